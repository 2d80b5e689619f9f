"""What the default gate times where nobody asked for it: a replacement by itself, where an estimate knows our side badly."""

import time

import pytest
import torch
from slow_product import Replace, compiled

import fusebackend
from fusebackend.profitability import measurement_store, policy
from fusebackend.profitability.budget import Budget
from fusebackend.rewriting.pattern import Estimate, Interval, Match

aten = torch.ops.aten
library = torch.library.Library("default_timing", "FRAGMENT")
library.define("sin(Tensor x, float seconds) -> Tensor")
torch.library.register_fake("default_timing::sin", lambda x, seconds: torch.empty_like(x), lib=library)


@torch.library.impl(library, "sin", "CompositeExplicitAutograd")
def _sin(x, seconds):
    time.sleep(seconds)
    return x.sin()


class Open(Replace):
    """Replaces a sine, for which Inductor generates code, by a call. The estimate does not tell which is faster."""

    def __init__(self, seconds, ours, inductor):
        super().__init__("test_open", aten.sin.default, None)
        self.seconds, self.ours, self.inductor = seconds, Interval(*ours), Interval(*inductor)

    def match(self, node):
        return Match((node,), lambda e: e.call(torch.ops.default_timing.sin.default, node.args[0], self.seconds))

    def estimate(self, match):
        return Estimate(None, "too close", "unmeasured", ours=self.ours, inductor=self.inductor)

    def fingerprint(self):
        return self.name


@pytest.fixture
def timed(own_cache, monkeypatch):
    """As on a GPU. Gives the subjects of what was timed."""
    subjects, time_replacement = [], policy.time_replacement

    def counted(region, subject):
        subjects.append(subject)
        return time_replacement(region, subject)

    why_not = policy.Gate._why_not_by_default
    on_a_gpu = torch.device("cuda")
    monkeypatch.setattr(policy.Gate, "_why_not_by_default", lambda self, core, _, estimate: why_not(self, core, on_a_gpu, estimate))
    monkeypatch.setattr(Budget, "why_default_spent", lambda self: None)
    monkeypatch.setattr(policy, "time_replacement", counted)
    return subjects


def report_of():
    torch._dynamo.reset()
    x = torch.randn(64)
    torch.testing.assert_close(compiled(torch.sin, "auto", ["test_open"])(x), x.sin())
    return fusebackend.last_report()


def test_a_fast_replacement_is_kept(temporary_pattern, timed):
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    found = report_of()
    assert found.counts() == {"test_open": 1} and len(timed) == 1
    (verdict,) = found.verdicts
    assert verdict.applied and verdict.inductor_ms == 40 and verdict.replaced_ms < 5 and "as estimated" in str(verdict)


def test_a_slow_one_is_not(temporary_pattern, timed):
    temporary_pattern(Open(0.05, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    found = report_of()
    assert not found.substitutions and len(timed) == 1
    (miss,) = found.rejections
    assert miss.code == "measured_slower" and miss.reason.startswith("gated out: ") and miss.reason.endswith("by Inductor as estimated")


class OpenProduct(Open):
    """Replaces the sine of a product, which is a library call and code. Nothing is known of the times."""

    def __init__(self, seconds):
        super().__init__(seconds, (1, 1, 1), (1, 1, 1))

    def match(self, node):
        (product,) = node.args
        operator = torch.ops.default_timing.sin.default
        return Match((node,), lambda e: e.call(operator, e.call(aten.mm.default, *product.args), self.seconds), interior=(product,))

    def estimate(self, match):
        return Estimate(None, "not calibrated", "unmeasured")


@pytest.mark.parametrize("fast", [True, False])
def test_what_takes_less_than_the_library_calls_that_it_replaces_is_kept(fast, temporary_pattern, timed):
    """Whatever the generated code takes. What takes longer is left to Inductor, which is said."""
    operator = torch.ops.slow_product.slow_mm.default if fast else aten.mm.default
    temporary_pattern(OpenProduct(0.0 if fast else 0.02))
    torch._dynamo.reset()
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    fn = compiled(lambda x, y: operator(x, y).sin(), "auto", ["test_open"])
    torch.testing.assert_close(fn(x, y), (x @ y).sin())
    found = fusebackend.last_report()
    assert bool(found.substitutions) is fast and len(timed) == 1
    (verdict,) = found.verdicts
    assert verdict.applied is fast
    if fast:
        assert verdict.inductor_ms > 10 > verdict.replaced_ms
    else:
        assert "in library calls alone; how long the rest" in verdict.why


def test_nothing_is_timed_that_could_not_decide(temporary_pattern, timed):
    temporary_pattern(Open(0.0, (30e3, 29e3, 31e3), (30e3, 20e3, 45e3)))
    found = report_of()
    assert not found.substitutions and not timed
    assert [r.code for r in found.rejections] == ["unmeasured"]


def test_a_kept_time_is_judged_by_the_estimate_of_the_day(temporary_pattern, timed):
    slow = Open(0.02, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3))
    temporary_pattern(slow)
    assert report_of().counts() == {"test_open": 1}
    (kept,) = (m for _, m in measurement_store.stored())
    assert kept.how == "replacement" and kept.inductor_ms == 0
    slow.inductor = Interval(20e3, 16e3, 25e3)
    assert not report_of().substitutions
    assert len(timed) == 1, "it was timed once"


def test_the_other_modes_time_both_forms(temporary_pattern, timed):
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    torch._dynamo.reset()
    compiled(torch.sin, "measure", ["test_open"])(torch.randn(64))
    assert not timed and {m.how for _, m in measurement_store.stored()} == {"region"}
