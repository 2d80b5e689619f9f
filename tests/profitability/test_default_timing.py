"""What the default gate times where nobody asked for it: a replacement by itself, where an estimate knows our side badly."""

import time

import pytest
import torch
from slow_product import Replace, are_from_cache, compiled, mm, slow_mm, square
from timed_patterns import Alternatives, Exchanged, Open, OpenProduct
from torch import fx

import fusebackend
from fusebackend.profitability import calibration, default_timing, measurement_store, policy, region_timing, timer
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.policy import Gate
from fusebackend.rewriting.pattern import Estimate, Interval, Match
from fusebackend.rewriting.profitability_policy import Proposal

aten = torch.ops.aten
library = torch.library.Library("default_timing", "FRAGMENT")
LOADING, loaded = 1.0, []  # seconds, which the first call takes
library.define("mm_that_loads(Tensor x, Tensor y) -> Tensor")
torch.library.register_fake("default_timing::mm_that_loads", torch.mm, lib=library)


@torch.library.impl(library, "mm_that_loads", "CompositeExplicitAutograd")
def _mm_that_loads(x, y):
    if not loaded:
        time.sleep(LOADING)
    loaded.append(True)
    return torch.mm(x, y)


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


@pytest.mark.parametrize(("around", "kept"), [(None, True), ((500, 400, 600), True), ((3.5e3, 3e3, 4.1e3), False)])
def test_what_stands_around_a_replacement_is_added_to_its_time(around, kept, temporary_pattern, timed):
    """By itself it is fast. Kernels of neighbours that are not fused any more, which are not timed with it, may take all that it gains."""
    temporary_pattern(Open(0.0, (4e3, 500, 8e3), (4e3, 3e3, 5e3), around))
    found = report_of()
    assert bool(found.substitutions) is kept and len(timed) == 1
    if not kept:
        (verdict,), (miss,) = found.verdicts, found.rejections
        assert 3.5 < verdict.replaced_ms < 4 == verdict.inductor_ms, "the reason adds up"
        assert miss.reason.endswith("as estimated, too close to tell")


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


@pytest.mark.parametrize(("generated", "kept"), [((30e3, 25e3, 36e3), True), ((15e3, 12e3, 19e3), False)])
def test_library_calls_that_were_timed_and_an_estimate_of_the_rest_decide_together(generated, kept, temporary_pattern, timed):
    """Nothing is known of the library calls before; the replacement takes 20 ms, longer than they do alone."""
    temporary_pattern(OpenProduct(0.02, Interval(*generated)))
    torch._dynamo.reset()
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    torch.testing.assert_close(compiled(lambda x, y: (x @ y).sin(), "auto", ["test_open"])(x, y), (x @ y).sin())
    (verdict,) = fusebackend.last_report().verdicts
    assert verdict.applied is kept and len(timed) == 1
    assert verdict.inductor_ms > generated[0] / 1e3 and "as estimated" in str(verdict)


@pytest.mark.parametrize(
    ("inductor", "error", "untimed", "is_timed"), [(40.0, 0.1, "", False), (40.0, 0.4, "", True), (40.0, 0.4, "another order", False)]
)
def test_library_calls_are_timed_unless_the_estimate_is_clear(inductor, error, untimed, is_timed, temporary_pattern, timed):
    """The estimate says 20 us against 40, but the replacement is slow. Nor are they timed where that would tell of another graph."""

    class Product(Replace):
        def estimate(self, match):
            return Estimate(True, ours=Interval.around(20.0, error), inductor=Interval.around(inductor, error), untimed=untimed)

    temporary_pattern(Product("test_clear", aten.mm.default, slow_mm))
    torch._dynamo.reset()
    x, y = square()
    torch.testing.assert_close(compiled(torch.mm, "auto", ["test_clear"])(x, y), x @ y)
    found = fusebackend.last_report()
    assert len(found.verdicts) == is_timed and found.counts() == ({} if is_timed else {"test_clear": 1})


def test_what_is_built_to_be_timed_costs_the_time_of_timing():
    """Building may compile a kernel."""
    graph = fx.Graph()
    x = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(64)
    pattern = Open(0.0, (1, 1, 1), (1, 1, 1))
    for pays, mode, counts in ((None, "auto", True), (True, "auto", False), (None, "measure", False)):
        gate = Gate(mode, 1.0, {})
        with gate.building(Proposal(pattern, "forward", Match((x,), lambda e: x), Estimate(pays))):
            time.sleep(0.01)
        assert (gate.budget.spent >= 0.01) is counts


def test_nothing_is_timed_that_could_not_decide(temporary_pattern, timed):
    temporary_pattern(Open(0.0, (30e3, 29e3, 31e3), (30e3, 20e3, 45e3)))
    found = report_of()
    assert not found.substitutions and not timed
    assert [r.code for r in found.rejections] == ["unmeasured"]


def test_a_kept_time_is_judged_by_the_estimate_of_the_day(temporary_pattern, timed, monkeypatch):
    slow = Open(0.02, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3))
    temporary_pattern(slow)
    assert report_of().counts() == {"test_open": 1}
    (kept,) = (m for _, m in measurement_store.stored())
    assert kept.how == "replacement" and kept.inductor_ms == 0
    slow.inductor = Interval(20e3, 16e3, 25e3)
    monkeypatch.setattr(calibration, "digest", lambda device: "of the next day")
    assert not report_of().substitutions
    assert len(timed) == 1, "it was timed once"


def test_what_is_called_is_timed_once_whatever_stands_around_it(temporary_pattern, timed):
    """A model's first and last layers have other neighbours than those between."""
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    torch._dynamo.reset()
    x, y = torch.randn(64), torch.randn(64)
    compiled(lambda x, y: (x.sin() + 1, y.sin().exp()), "auto", ["test_open"])(x, y)
    found = fusebackend.last_report()
    assert found.counts() == {"test_open": 2} and len(timed) == 1
    assert sorted(v.why.split(";")[0] for v in found.verdicts) == ["as above", "measured"]


def test_what_was_timed_is_known_of_like_sites_when_no_time_is_left(temporary_pattern, timed, monkeypatch):
    """Of a model's layers the first is timed. Before it there was no time for another site."""
    asked = []
    monkeypatch.setattr(
        Budget, "why_default_spent", lambda self, *what: asked.append(what) or ("none" if timed or len(asked) == 1 else None)
    )
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    fn = compiled(lambda w, x, y, z: (w.sin() + 1, x.sin() + 1, y.sin().exp(), z.sin() * 2), "auto", ["test_open"])
    fn(torch.randn(32), *(torch.randn(64) for _ in range(3)))
    assert fusebackend.last_report().counts() == {"test_open": 3} and len(timed) == 1


@pytest.mark.parametrize("mode", ["auto", "measure"])
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_replacement_that_was_not_calibrated_is_timed_against_its_rival(mode, seconds, temporary_pattern, timed, monkeypatch):
    monkeypatch.setattr(region_timing, "MARGIN", 5.0)  # the rival's form takes as long as the original: on a busy machine 1.05 is noise
    pattern = Alternatives(seconds)
    temporary_pattern(pattern)
    torch._dynamo.reset()
    x = torch.randn(64)
    torch.testing.assert_close(compiled(torch.sin, mode, ["test_open"])(x), x.sin())
    found = fusebackend.last_report()
    assert len(timed) == 1
    if mode == "auto":
        (made,) = found.substitutions
        assert (made.note == "otherwise") is (seconds > 0)
        assert not found.rejections and [v.applied for v in found.verdicts] == [True] * (seconds == 0)
    else:  # both forms of what is left are compiled, and Inductor's takes microseconds
        assert not found.substitutions and len(found.rejections) == 1
        assert {m.how for _, m in measurement_store.stored()} == {"replacement", "region"}


def test_both_forms_compiled_tell_more_than_the_rival(temporary_pattern, timed, monkeypatch):
    """Mode "measure" found Inductor's form to be the fastest, which the estimate does not know."""
    monkeypatch.setattr(policy, "time_region", lambda region, subject, **_: Measurement(False, 2.0, 1.0, "region", subject))
    temporary_pattern(Alternatives(0.0))
    x = torch.randn(64)
    compiled(torch.sin, "measure", ["test_open"])(x)
    assert are_from_cache(compiled(torch.sin, "auto", ["test_open"]), x) == [False, True]
    (verdict,) = fusebackend.last_report().verdicts
    assert not verdict.applied and not fusebackend.last_report().substitutions


def test_times_that_do_not_tell_of_this_graph_are_not_looked_up(temporary_pattern, timed):
    """Another graph's library calls are the same, but in another order."""

    class Product(Exchanged):
        untimed = ""

        def estimate(self, match):
            return Estimate(True, untimed=self.untimed)

    pattern = temporary_pattern(Product(mm, slow_mm, True))
    compiled(torch.mm, "auto", ["test_exchanged"])(*square())
    assert not fusebackend.last_report().substitutions
    pattern.untimed = "another order"
    torch._dynamo.reset()
    compiled(lambda x, y: torch.mm(x, y) + 1, "auto", ["test_exchanged"])(*square())
    assert fusebackend.last_report().counts() == {"test_exchanged": 1}


def test_where_nothing_may_be_timed_the_rival_is_taken(temporary_pattern, timed, monkeypatch):
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *_: "it is too short")
    temporary_pattern(Alternatives(0.0))
    (made,) = report_of().substitutions
    assert made.note == "otherwise" and made.estimated_us == 30e3 and not timed


def test_the_other_modes_time_both_forms(temporary_pattern, timed):
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    torch._dynamo.reset()
    compiled(torch.sin, "measure", ["test_open"])(torch.randn(64))
    assert not timed and {m.how for _, m in measurement_store.stored()} == {"region"}


def test_the_first_call_of_a_library_is_not_counted(temporary_pattern, timed, monkeypatch):
    """cuDNN loads for 1.7 s, which was all that ConvNeXt's compile might spend on timing, and takes half a second for each other size."""
    budgets, began = [], Budget.__init__

    def kept(self, seconds):
        began(self, seconds)
        budgets.append(self)

    monkeypatch.setattr(Budget, "__init__", kept)
    loaded.clear()
    temporary_pattern(OpenProduct(0.0))
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    fn = compiled(lambda x, y: torch.ops.default_timing.mm_that_loads(x, y).sin(), "auto", ["test_open"])
    torch.testing.assert_close(fn(x, y), (x @ y).sin())
    assert len(timed) == 1 and loaded, "it was called"
    assert 0 < sum(b.spent for b in budgets) < LOADING


@pytest.fixture
def compiling(timed, monkeypatch):
    """As on a GPU late in a long compile: there is time to compile regions. Gives the regions that were."""
    regions, time_region = [], default_timing.time_region

    def counted(region, subject, **kwargs):
        regions.append(subject)
        return time_region(region, subject, **kwargs)

    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *_: None)
    monkeypatch.setattr(default_timing, "time_region", counted)
    return regions


@pytest.mark.parametrize("known", [True, False])
def test_a_region_with_much_to_gain_is_compiled(known, temporary_pattern, compiling):
    """The replacement takes 20 ms, Inductor's form in truth microseconds: the estimate says 10 to 40 ms, or nothing."""
    slow = Open(0.02, (30e3, 5e3, 60e3), (20e3, 10e3, 40e3))
    if not known:
        slow.ours = slow.inductor = None
    temporary_pattern(slow)
    assert not report_of().substitutions
    (kept,) = (m for _, m in measurement_store.stored() if m.how == "region")
    assert not kept.kept and kept.inductor_ms < 10 < kept.replaced_ms
    assert not report_of().substitutions
    assert len(compiling) == 1, "what was measured is not measured again"


def test_a_region_is_compiled_where_ours_was_not_calibrated(temporary_pattern, compiling, timed):
    """The replacement by itself is faster than the estimate of Inductor's form, but what its neighbours lose is not in that time."""
    fast = Open(0.0, (0, 0, 0), (20e3, 10e3, 40e3))
    fast.ours = None
    temporary_pattern(fast)
    report_of()
    assert len(timed) == len(compiling) == 1
    assert {m.how for _, m in measurement_store.stored()} == {"replacement", "region"}


def test_a_slow_replacement_that_was_not_calibrated_is_not_compiled(temporary_pattern, compiling, timed):
    slow = Open(0.02, (0, 0, 0), (200, 100, 400))
    slow.ours = None
    temporary_pattern(slow)
    assert not report_of().substitutions
    assert len(timed) == 1 and not compiling


def test_a_region_with_little_to_gain_is_not_compiled(temporary_pattern, compiling):
    """Inductor's form takes 0.1 us more at the most: in 10,000 runs 1 ms."""
    time_of_ours = 20e3
    temporary_pattern(Open(0.02, (time_of_ours, 5e3, 60e3), (time_of_ours - 100, 10e3, time_of_ours + 0.1)))
    report_of()
    assert not compiling


def test_what_compiling_took_is_expected_of_the_next(temporary_pattern, compiling, monkeypatch):
    """The second site is left where the rest of the budget is less than the first took."""
    asked = []
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, doing="calling", seconds=0.0: asked.append(seconds))
    monkeypatch.setattr(default_timing, "COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(default_timing, "calling_seconds", lambda ours, inductor: 0.0)
    temporary_pattern(Open(0.02, (30e3, 5e3, 60e3), (20e3, 10e3, 40e3)))
    torch._dynamo.reset()
    x = torch.randn(64)
    compiled(lambda x: (x.sin(), (x[:32] * 2).sin()), "auto", ["test_open"])(x)
    wanted = [seconds for seconds in asked if seconds > 0]
    assert wanted[0] == 0.01 and wanted[-1] > 0.05


def test_both_forms_are_compiled_where_inductors_time_decides(temporary_pattern, compiling, timed):
    """Ours is known well, and Inductor's generated code may be slower: nothing has to be called by itself."""
    temporary_pattern(Open(0.0, (300, 250, 350), (400, 200, 800)))
    report_of()
    assert not timed and len(compiling) == 1


def test_nothing_is_compiled_where_the_compile_is_too_short_for_it(temporary_pattern, timed, monkeypatch):
    temporary_pattern(Open(0.0, (300, 250, 350), (400, 200, 800)))
    found = report_of()
    assert not found.substitutions and not timed
    assert "not timed, since it is too short" in found.rejections[0].reason


def test_a_region_that_pays_soon_is_compiled_in_however_short_a_compile(temporary_pattern, timed, monkeypatch):
    """Inductor's form takes 10 ms more, as estimated: in 1,000 runs that is more than compiling and calling both takes, which is counted
    apart."""
    budgets, began = [], Budget.__init__
    monkeypatch.setattr(Budget, "__init__", lambda self, seconds: budgets.append(self) or began(self, seconds))
    temporary_pattern(Open(0.02, (20e3, 19e3, 21e3), (30e3, 1e3, 500e3)))
    report_of()
    assert "region" in {m.how for _, m in measurement_store.stored()}
    assert sum(b.spent_apart for b in budgets) > sum(b.spent for b in budgets)


@pytest.fixture
def asked(own_cache, monkeypatch):
    """What time calls were said to take, of which there is none: as on a CPU, where that is estimated first."""
    seconds = []

    def none_left(self, doing="calling", needed=0.0):
        if doing == "calling":
            seconds.append(needed)
        return "it is too short"

    monkeypatch.setattr(Budget, "why_default_spent", none_left)
    return seconds


def test_on_a_cpu_calls_that_take_long_wait_for_a_long_compile(temporary_pattern, asked):
    temporary_pattern(Open(0.0, (300e3, 5e3, 9e6), (300e3, 5e3, 9e6)))
    found = report_of()
    assert set(asked) == {216.0} and not found.substitutions, "12 calls of 9 s at the most, both ways"
    assert "not timed, since it is too short" in found.rejections[0].reason


def test_on_a_cpu_nothing_is_called_of_which_it_is_not_known_how_long_it_takes(temporary_pattern, asked):
    unknown = Open(0.0, (0, 0, 0), (20e3, 10e3, 40e3))
    unknown.ours = None
    temporary_pattern(unknown)
    assert not report_of().substitutions and not asked


def test_on_a_cpu_calls_that_pay_soon_are_made_in_however_short_a_compile(temporary_pattern, asked):
    temporary_pattern(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
    found = report_of()
    assert found.counts() == {"test_open": 1} and not asked
    assert {m.how for _, m in measurement_store.stored()} == {"replacement"}


def test_less_time_than_is_needed_is_no_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    budget = Budget(60.0)
    now[0] = 30.0
    assert budget.why_default_spent() is None and budget.why_default_spent("compiling", 1.4) is None
    assert "compiling both forms takes 1.6 s" in budget.why_default_spent("compiling", 1.6), "half is left to what is called"
    assert budget.why_default_spent("calling", 2.9) is None
    assert "calling both forms takes 3.1 s" in budget.why_default_spent("calling", 3.1)
    budget.spent = 2.9
    assert budget.why_default_spent() is None and budget.why_default_spent("compiling", 0.1) is not None
    budget.spent = 3.0
    assert "is spent (3 s)" in budget.why_default_spent()
    now[0] = 1000.0
    assert budget.why_default_spent("compiling", 1.9) is None, "10 s in all, 5 of them compiling"
    assert budget.why_default_spent("compiling", 2.1) is not None
    budget.spent_apart = 7.0
    assert budget.why_spent_apart("calling", 3.0) is None, "and 10 s for what pays soon"
    assert "calling both forms takes 3.1 s" in budget.why_spent_apart("calling", 3.1)


@pytest.mark.parametrize(
    ("ours_ms", "is_lighter", "kept"), [(1.0, True, True), (1.0, False, False), (1.01, True, False), (0.9, False, True)]
)
def test_calls_that_take_less_of_the_host_are_taken_where_both_take_as_long(
    ours_ms, is_lighter, kept, temporary_pattern, timed, monkeypatch
):
    class Product(Exchanged):
        def estimate(self, match):
            return Estimate(None, "?", "unmeasured", is_lighter=is_lighter)

    monkeypatch.setattr(timer, "times_ms", lambda *_, **__: [ours_ms, 1.0])
    temporary_pattern(Product(mm, slow_mm, None))
    torch._dynamo.reset()
    compiled(torch.mm, "auto", ["test_exchanged"])(*square())
    (verdict,) = fusebackend.last_report().verdicts
    assert verdict.applied is kept and verdict.replaced_ms == ours_ms
