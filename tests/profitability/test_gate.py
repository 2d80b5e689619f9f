"""The gate never chooses what is slow, keeps what is fast, remembers both, and never faults while it measures.

No test here judges a time: what is slow on purpose is slower by orders of magnitude.
"""

import dataclasses
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from slow_product import Replace, compiled, mm, slow_mm, square

import fusebackend
from fusebackend.__main__ import main
from fusebackend.native import loader
from fusebackend.profitability import calibration, estimating, measurement_store, region, region_timing, timer
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.time_model import TimeModel
from fusebackend.report.model import Report
from fusebackend.rewriting.pattern import Estimate, Generated, Match, Work, Workload

aten = torch.ops.aten


class Unwanted(Replace):
    """Estimated to be slower. Counts how often its replacement is built."""

    def __init__(self, name, old, new):
        super().__init__(name, old, new)
        self.built = 0

    def match(self, node):
        def emit(e):
            self.built += 1
            return e.call(self.new, *node.args)

        return Match((node,), emit)

    def estimate(self, match):
        return Estimate(False, "it is too small")

    def fingerprint(self):
        return self.name


pytestmark = pytest.mark.usefixtures("own_cache", "the_long_way")
IS_CALLS = region.Region.is_calls

# ---- what is chosen ----


@pytest.mark.parametrize("mode", ["measure", "race"])
def test_what_is_slow_on_purpose_is_never_chosen(slow, mode, tmp_path):
    x, y = square()
    torch.testing.assert_close(compiled(torch.mm, mode, ["test_slow"])(x, y), x @ y)
    found = fusebackend.last_report()
    assert not found.substitutions
    (miss,) = found.rejections
    assert miss.reason.startswith("gated out: ") and " replaced against " in miss.reason and miss.reason.endswith(" by Inductor")
    (verdict,) = found.verdicts
    assert verdict.replaced_ms > verdict.inductor_ms and verdict.why == "measured" and not verdict.applied
    assert miss.reason in str(found)
    assert miss.reason in found.save(tmp_path / "report.html").read_text()
    assert Report.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("mode", ["measure", "race"])
def test_what_is_fast_is_kept(fast, mode):
    x, y = square()
    torch.testing.assert_close(compiled(slow_mm, mode, ["test_fast"])(x, y), x @ y)
    found = fusebackend.last_report()
    assert found.counts() == {"test_fast": 1}
    assert all(v.applied and v.replaced_ms < v.inductor_ms for v in found.verdicts)
    assert [v.pattern for v in found.verdicts] == ["test_fast", ""][: 2 if mode == "race" else 1]
    assert "kept: " in str(found)


@pytest.fixture
def shipped(calibrated):
    """A calibration that ships with the package, by which every replacement pays."""
    calibrated(ours_us=1.0)
    return dataclasses.replace(calibration.of_device(torch.device("cpu")), origin=str(calibration.FOLDER / "x.json"))


@pytest.mark.parametrize(("march", "applied"), [("x86-64-v3", True), ("armv8-a", False), ("x86-64", False)])
def test_portable_cpu_kernels_are_used_only_where_they_were_timed(march, applied, monkeypatch, library, shipped):
    """No estimate of ours is about them. With the gate off every legal match is applied all the same."""
    monkeypatch.setattr(loader, "_loaded", dataclasses.replace(loader.load(), march=march))
    monkeypatch.setattr(calibration, "of_device", lambda device: shipped)
    x, w = torch.randn(2, 32, 64), torch.randn(32, 1, 4)

    def fn(x, w):
        return torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0)), w, groups=32)

    report = fusebackend.explain(torch.compile(fn, backend="fuse"), x, w)
    assert bool(report.substitutions) is applied
    if not applied:
        assert {r.code for r in report.rejections if r.pattern.startswith("causal_conv1d")} == {"unmeasured"}
        assert "portable code" in str(report)
    torch._dynamo.reset()
    assert fusebackend.explain(torch.compile(fn, backend="fuse", options={"fuse.gate": "off"}), x, w).substitutions


@pytest.mark.parametrize("whose", ["the user's", "shipped"])
def test_the_users_own_calibration_is_believed_of_portable_kernels(whose, monkeypatch, library, shipped):
    """It was made with them; one that ships was not, on whatever CPU."""
    monkeypatch.setattr(loader, "_loaded", dataclasses.replace(loader.load(), march="armv8-a"))
    if whose == "shipped":
        monkeypatch.setattr(calibration, "of_device", lambda device: shipped)
    report = fusebackend.explain(torch.compile(lambda x, y: x.t() + y, backend="fuse"), torch.randn(24, 16), torch.randn(16, 24))
    assert bool(report.substitutions) is (whose == "the user's")


def test_library_calls_are_called_as_they_are(slow, monkeypatch):
    monkeypatch.setattr(region.Region, "is_calls", IS_CALLS)
    monkeypatch.setattr(region_timing, "compile_apart", lambda *_: pytest.fail("compiled"))
    x, y = square()
    torch.testing.assert_close(compiled(torch.mm, "measure", ["test_slow"])(x, y), x @ y)
    assert "gated out: " in str(fusebackend.last_report())


def test_symbolic_sizes_are_timed_at_their_hints(slow):
    fn = torch.compile(torch.mm, backend="fuse", dynamic=True, options={"fuse.gate": "race", "fuse.patterns": ["test_slow"]})
    for n in (16, 24):
        x, y = square(n)
        torch.testing.assert_close(fn(x, y), x @ y)
    assert len(fusebackend.reports()) == 1, "timing must not make the graph recompile"
    (verdict,) = fusebackend.last_report().verdicts
    assert verdict.replaced_ms > verdict.inductor_ms


def test_equal_regions_are_timed_once(slow, monkeypatch):
    runs = []
    real = timer.times_ms
    monkeypatch.setattr(timer, "times_ms", lambda *a, **k: runs.append(1) or real(*a, **k))
    x, y = square()
    compiled(lambda x, y: (x @ y, y @ x), "measure", ["test_slow"])(x, y)
    assert len(runs) == 1 and len(fusebackend.last_report().rejections) == 2


def test_where_the_estimate_cannot_tell_only_a_measurement_applies_it(temporary_pattern, monkeypatch):
    temporary_pattern(Replace("test_unproven", slow_mm, mm, unproven="nobody knows"))
    x, y = square()

    def substitutions(mode):
        torch._dynamo.reset()
        compiled(slow_mm, mode, ["test_unproven"])(x, y)
        return len(fusebackend.last_report().substitutions)

    assert substitutions("auto") == 0
    assert "nobody knows; not timed" in str(fusebackend.last_report())
    assert substitutions("off") == 1
    assert substitutions("measure") == 1
    assert substitutions("auto") == 1, "the kept verdict decides"
    assert measurement_store.clear() == 1
    assert substitutions("auto") == 0


def test_what_is_estimated_to_be_slower_is_refused_unbuilt_unless_a_kept_verdict_disagrees(temporary_pattern):
    """The order: the user, a kept verdict, the estimate."""
    pattern = temporary_pattern(Unwanted("test_unwanted", slow_mm, mm))
    x, y = square()

    def substitutions(mode):
        torch._dynamo.reset()
        pattern.built = 0
        compiled(slow_mm, mode, ["test_unwanted"])(x, y)
        return len(fusebackend.last_report().substitutions), pattern.built

    assert substitutions("auto") == (0, 0)
    (miss,) = fusebackend.last_report().rejections
    assert (miss.reason, miss.code, miss.node) == ("it is too small", "estimated_slower", "slow_mm")
    assert substitutions("off") == (1, 1)
    assert substitutions("measure") == (1, 1)
    assert substitutions("auto") == (1, 1)
    x, y = square(24)
    assert substitutions("auto") == (0, 0), "another site"


def test_code_without_a_substitution_is_compiled_again_once_a_verdict_asks_for_it(temporary_pattern):
    temporary_pattern(Unwanted("test_unwanted", slow_mm, mm))
    inputs = square()
    by_default, measuring = (compiled(slow_mm, mode, ["test_unwanted"]) for mode in ("auto", "measure"))
    assert [from_cache(by_default, inputs) for _ in range(2)] == [False, True]
    measuring(*inputs)
    assert [from_cache(by_default, inputs) for _ in range(2)] == [False, True]
    assert fusebackend.last_report().counts() == {"test_unwanted": 1}


@pytest.mark.parametrize(("paying", "asked_for"), [((), [2, 3, 4, 5]), ((4,), [2, 3, 4, 5, 6, 7, 8]), ((8,), [2, 3, 4, 5])])
def test_inductor_is_not_asked_on_and_on_in_vain(paying, asked_for, temporary_pattern, monkeypatch):
    """Of eight sites of seven sizes; two that are alike are one question. After four in a row that were left to Inductor all the same, it
    is asked for none."""

    class Asked(Replace):
        def estimate(self, match):
            return Workload((Work("k", {"us": 10.0}),), (Generated(match.outputs),))

    def works_of(work):
        (size, _) = work.nodes[0].meta["val"].shape
        asked.append(size)
        return [[Work("k", {"us": 100.0 if size in paying else 1.0})]]

    asked = []
    known = calibration.Calibration("a device", "2.13", "2026-01-01", 9, {"k": TimeModel(0.0, {"us": 1.0}, 1.0, noise=0.1)}, {}, call=0.0)
    monkeypatch.setattr(calibration, "of_device", lambda device: known)
    monkeypatch.setattr(estimating, "works_of", works_of)
    temporary_pattern(Asked("test_asked", mm, slow_mm))
    inputs = [torch.randn(n, n) for n in (2, 3, 4, 5, 5, 6, 7, 8)]
    compiled(lambda *xs: [x @ x for x in xs], "auto", ["test_asked"])(*inputs)
    found = fusebackend.last_report()
    assert asked == asked_for
    assert len(found.substitutions) == len(set(paying) & set(asked_for))
    not_asked = [r for r in found.rejections if "for 4 sites of this pattern in a row Inductor was asked in vain" in r.reason]
    assert len(not_asked) == 7 - len(asked_for) and all(r.code == "unmeasured" for r in not_asked)


# ---- what goes wrong ----


def test_a_failure_leaves_the_decision_to_the_estimate(fast, monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler today\nsecond line")

    monkeypatch.setattr(region_timing, "compile_apart", fail)
    x, y = square()
    with pytest.raises(Exception, match="no compiler today"):
        compiled(slow_mm, "measure", ["test_fast"])(x, y)
    torch._dynamo.reset()
    compiled(slow_mm, "measure", ["test_fast"], **{"fuse.strict": False})(x, y)
    found = fusebackend.last_report()
    assert found.counts() == {"test_fast": 1}
    assert "not timed: timing raised RuntimeError: no compiler today" in str(found)


def test_the_time_is_bounded(slow, monkeypatch):
    monkeypatch.setattr(timer, "times_ms", lambda *_, **__: pytest.fail("timed"))
    compiled(torch.mm, "measure", ["test_slow"], **{"fuse.gate_seconds": 0})(*square())
    found = fusebackend.last_report()
    assert found.counts() == {"test_slow": 1} and "the 0 s of fuse.gate_seconds are spent" in str(found)


def test_explain_times_nothing_and_uses_kept_verdicts(slow, monkeypatch):
    fn, inputs = compiled(torch.mm, "measure", ["test_slow"]), square()
    with monkeypatch.context() as patch:
        patch.setattr(timer, "times_ms", lambda *_, **__: pytest.fail("timed"))
        assert fusebackend.explain(fn, *inputs).counts() == {"test_slow": 1}
    fn(*inputs)
    assert "gated out" in str(fusebackend.explain(fn, *inputs))


# ---- what is remembered ----


SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, fusebackend
    sys.path.insert(0, sys.argv[1])
    from slow_product import Replace, compiled, mm, slow_mm, square

    from fusebackend.profitability import timer

    fusebackend.register(Replace("test_slow", mm, slow_mm))
    fusebackend.register(Replace("test_fast", slow_mm, mm))
    if "cached" in sys.argv:
        def fail(*_, **__):
            raise AssertionError("timed again")
        timer.times_ms = fail
    found = {}
    for name, old in ("test_slow", mm), ("test_fast", slow_mm):
        compiled(lambda x, y, old=old: old(x, y), "race", [name])(*square())
        report = fusebackend.last_report()
        found[name] = [report.counts(), report.from_cache, [str(v) for v in report.verdicts]]
    print(json.dumps(found))
    """
)


@pytest.mark.codegen
def test_a_second_process_takes_all_verdicts_from_the_cache(tmp_path, monkeypatch, request):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*arguments):
        done = subprocess.run([sys.executable, script, request.path.parent, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, warm = run(), run("cached")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another"))
    second = run("cached")
    for name, counts in ("test_slow", {}), ("test_fast", {"test_fast": 1}):
        assert first[name][0] == warm[name][0] == second[name][0] == counts
        assert [found[name][1] for found in (first, warm, second)] == [False, True, False]
        assert first[name][2] and all("(measured)" in v for v in first[name][2])
        assert all("(cached)" in v for v in warm[name][2] + second[name][2])


def from_cache(fn, inputs):
    torch._dynamo.reset()
    fn(*inputs)
    return fusebackend.last_report().from_cache


def test_compiled_code_is_taken_from_the_cache_until_a_verdict_changes(fast):
    fn, inputs = compiled(slow_mm, "measure", ["test_fast"]), square()
    assert [from_cache(fn, inputs) for _ in range(3)] == [False, True, True]
    ((key, verdict),) = measurement_store.stored()
    measurement_store.save(key, Measurement(False, 2.0, 1.0, verdict.how))
    assert [from_cache(fn, inputs) for _ in range(2)] == [False, True]
    assert not fusebackend.last_report().substitutions
    measurement_store.clear()
    assert [from_cache(fn, inputs) for _ in range(2)] == [False, True]
    assert fusebackend.last_report().substitutions


def test_a_damaged_verdict_counts_as_none(slow):
    folder = measurement_store.folder()
    measurement_store.save("good", Measurement(True, 1.0, 2.0, "region"))
    for name, text in {"cut": '{"kept": tr', "other": "[]", "zero": '{"kept": 1, "replaced_ms": 0, "inductor_ms": 1, "how": ""}'}.items():
        (folder / f"{name}.json").write_text(text)
        assert measurement_store.load(name) is None
    assert [key for key, _ in measurement_store.stored()] == ["good"]


def test_the_command_line_lists_and_clears(slow, capsys):
    compiled(torch.mm, "measure", ["test_slow"])(*square())
    capsys.readouterr()
    assert main(["gate", "list"]) == 0
    printed = capsys.readouterr().out
    assert "gated out: " in printed and "(region): test_slow f32[16, 16], f32[16, 16] -> f32[16, 16]" in printed
    assert main(["gate", "clear"]) == 0 and "1 verdicts forgotten" in capsys.readouterr().out
    assert main(["gate", "list"]) == 0 and capsys.readouterr().out.startswith("0 verdicts")


# ---- random state and modes ----


def test_random_state_and_modes_are_as_before():
    state = torch.get_rng_state()
    with timer.undisturbed(torch.device("cpu")):
        torch.randn(3)
        assert not torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled()


# ---- CUDA ----


@pytest.mark.cuda
@pytest.mark.codegen
@pytest.mark.parametrize("kind", ["slow", "fast"])
def test_auto_times_library_calls_on_cuda(slow, fast, kind):
    x, y = (t.cuda() for t in square(1024))
    torch._dynamo.reset()
    product = torch.mm if kind == "slow" else slow_mm
    compiled(lambda x, y: product(torch.relu(x + 1), y), "auto", [f"test_{kind}"])(x, y)
    found = fusebackend.last_report()
    (verdict,) = found.verdicts
    assert verdict.why == "measured" and verdict.applied == (kind == "fast")
    assert next(v for _, v in measurement_store.stored()).how == "calls"
