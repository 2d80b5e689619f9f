"""explain and the reports of real compiles."""

import dataclasses
import inspect
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args

import pytest
import torch
from stand_in_calibrations import FASTER_US, SLOWER_US, THEIRS_US
from torch import nn
from torch.nn import functional as F

import fusebackend
from fusebackend.profitability import calibration
from fusebackend.profitability.time_model import TimeModel
from fusebackend.report.comparison import compare
from fusebackend.report.model import Rejection, Report, Source, Substitution, Verdict
from fusebackend.report.module_paths import condensed
from fusebackend.report.text import Gains
from fusebackend.rewriting.pattern import Code
from fusebackend.rewriting.provenance import readable_path


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x, y):
        x = x.transpose(0, 1) + y  # the line
        return self.norm(self.linear(x))


LINE = inspect.getsourcelines(Model)[1] + [i for i, s in enumerate(inspect.getsourcelines(Model)[0]) if "# the line" in s][0]


def ungated(fn):
    return torch.compile(fn, backend="fuse", options={"fuse.gate": "off", "fuse.patterns": ["transpose_add"]})


def test_explain_names_the_users_line_shapes_and_both_graphs():
    model = Model()
    report = fusebackend.explain(ungated(model), torch.randn(24, 16, requires_grad=True), torch.randn(16, 24))
    (substitution,) = report.substitutions
    assert (substitution.pattern, substitution.graph) == ("transpose_add", "forward")
    assert (substitution.source.file, substitution.source.line) == (__file__, LINE)
    assert "x.transpose(0, 1) + y" in substitution.source.code
    assert substitution.outputs == ("f32[16, 24]",)
    assert {c.name for c in report.graphs} == {"forward", "backward"}
    forward = next(c for c in report.graphs if c.name == "forward")
    assert "aten.add.Tensor" in forward.before and "fusebackend.transpose_add" in forward.after
    assert "transpose_add" in str(report) and f"test_report.py:{LINE}" in str(report)


def test_explain_leaves_buffers_random_state_and_grads_alone():
    model = Model().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    fusebackend.explain(
        model,
        torch.randn(24, 16),
        torch.randn(16, 24),
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    torch.set_rng_state(state)


def test_explain_gives_reasons_and_counts_graph_breaks(calibrated):
    calibrated(SLOWER_US)

    def fn(x, y):
        a = torch.relu(x.t() + y)
        torch._dynamo.graph_break()
        return x.t().double() + y.double(), a

    report = fusebackend.explain(fn, torch.randn(8, 6), torch.randn(6, 8))
    assert len(report.graphs) == 2 and all(c.before and c.after for c in report.graphs)
    assert any("Inductor fuses it with its neighbour aten.relu" in r.reason for r in report.rejections)
    assert all(r.source.file == __file__ for r in report.rejections)


def test_the_gain_is_the_estimates_where_nothing_was_timed(calibrated, tmp_path):
    calibrated(FASTER_US)
    arguments = torch.randn(24, 16), torch.randn(16, 24)
    report = fusebackend.explain(lambda x, y: x.t() + y, *arguments)
    (made,) = report.substitutions
    assert made.inductor_us == pytest.approx(THEIRS_US) and made.estimated_us is not None and made.estimated_us >= FASTER_US
    said = f"~{made.inductor_us / made.estimated_us:.2f}x"
    assert said in str(report) and "by the estimates all take" in str(report)
    page = report.save(tmp_path / "page.html").read_text()
    assert f"{said.strip('~')} faster than Inductor, estimated" in page
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).substitutions == [made]
    torch._dynamo.reset()
    asked_nothing = fusebackend.explain(ungated(lambda x, y: x.t() + y), *arguments)
    assert asked_nothing.substitutions[0].estimated_gain is None and "~" not in str(asked_nothing)


def test_explain_takes_what_torch_compile_returned():
    compiled = torch.compile(lambda x, y: x.t() + y, backend="fuse", dynamic=True, options={"fuse.patterns": []})
    assert not fusebackend.explain(compiled, torch.randn(8, 6), torch.randn(6, 8)).substitutions


def test_explain_says_when_nothing_was_compiled():
    assert "nothing was compiled" in str(fusebackend.explain(lambda: 3))
    assert "another backend" not in str(fusebackend.explain(lambda: 3))
    elsewhere = torch.compile(lambda x: x + 1, backend="eager")
    assert "or it was compiled with another backend" in str(fusebackend.explain(elsewhere, torch.ones(2)))
    with pytest.raises(TypeError, match="fn_or_module must be callable, got int"):
        fusebackend.explain(3)


def test_a_report_of_a_later_version_is_refused():
    data = Report().to_dict()
    with pytest.raises(ValueError, match="a report of schema 3, which a later version wrote"):
        Report.from_dict({**data, "schema": 3})


def test_a_report_survives_json():
    report = fusebackend.explain(Model(), torch.randn(24, 16), torch.randn(16, 24))
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_has_codes_of_its_reasons_and_loads_without_them():
    report = fusebackend.explain(lambda x, y: torch.relu(x.t() + y), torch.randn(8, 6), torch.randn(6, 8))
    data = json.loads(json.dumps(report.to_dict()))
    assert all(r["code"] in get_args(Code) for r in data["rejections"]) and data["rejections"]
    for rejection in data["rejections"]:
        del rejection["code"]
    assert [(r.reason, r.code) for r in Report.from_dict(data).rejections] == [(r.reason, "") for r in report.rejections]


KEPT_BY_0_2 = Path(__file__).parent / "kept_by_0_2.json"


def test_a_report_of_the_version_before_loads(tmp_path):
    report = Report.from_dict(json.loads(KEPT_BY_0_2.read_text()))
    assert report.counts() == {"transpose_add": 1} and report.rejections and report.graphs
    assert report.coverage() is None and not report.context and not report.breaks and report.to_dict()["schema"] == 2
    assert "1 substitution in 2 graphs" in str(report)
    assert report.save(tmp_path / "x.html").stat().st_size > 10_000
    now = fusebackend.explain(ungated(Model()), torch.randn(24, 16, requires_grad=True), torch.randn(16, 24))
    assert ("coverage", "not counted", str(now.coverage())) in compare(report, now).context


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(24, 24)
        self.bias = nn.Parameter(torch.randn(16, 24))

    def forward(self, x):
        return self.mixer(x.transpose(0, 1) + self.bias).t().contiguous()


class Layers(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_sites_have_module_paths_and_inputs_their_names():
    report = fusebackend.explain(ungated(Layers()), torch.randn(24, 16, requires_grad=True))
    assert [s.module for s in report.substitutions] == ["layers.0", "layers.1", "layers.2"]
    forward = next(c for c in report.graphs if c.name == "forward")
    labels = [n.label for n in forward.nodes_before if n.target == "placeholder"]
    assert labels[:4] == ["x", "layers.0.bias", "layers.0.mixer.weight", "layers.0.mixer.bias"] and len(labels) == 10
    assert all(not n.label for n in forward.nodes_before if n.target != "placeholder")
    rows = [line for line in str(report).splitlines() if line.startswith("  transpose_add")]
    assert len(rows) == 1 and " layers.0-2 " in rows[0] and rows[0].endswith("(x3)"), rows


def test_near_misses_of_a_backward_have_the_module_of_their_forward():
    report = fusebackend.explain(torch.compile(Layers(1), backend="fuse"), torch.randn(24, 16, requires_grad=True))
    found = {(r.graph, r.module) for r in report.rejections}
    assert ("forward", "layers.0") in found or ("forward", "layers.0.mixer") in found
    assert {m.split(".mixer")[0] for _, m in found} <= {"layers.0", ""}


def test_coverage_counts_operators_and_bytes():
    x, y = torch.randn(32, 16), torch.randn(16, 32)
    report = fusebackend.explain(ungated(lambda x, y: (x.t() + y) @ y.t()), x, y)
    covered = report.coverage()
    # The sum and the product; views are no operators. Each reads two tensors and writes one.
    assert (covered.replaced_operators, covered.operators) == (1, 2)
    assert (covered.replaced_bytes, covered.moved_bytes) == (3 * 2048, 3 * 2048 + 2 * 2048 + 16 * 16 * 4)
    assert str(covered) in str(report) and report.to_dict()["coverage"]["operators"] == 2


def test_coverage_counts_what_was_replaced_before_forward_and_backward_were_parted(library):
    def fn(x, w):
        return F.conv1d(F.pad(x, (3, 0)), w, groups=8).sin()

    ungated_all = torch.compile(fn, backend="fuse", options={"fuse.gate": "off"})
    report = fusebackend.explain(ungated_all, torch.randn(2, 8, 64, requires_grad=True), torch.randn(8, 1, 4, requires_grad=True))
    assert {s.graph for s in report.substitutions if s.pattern.startswith("causal")} == {"joint"}
    covered = report.coverage()
    apart = sum(c.operators for c in report.graphs if c.name != "joint")
    assert 0 < covered.replaced_operators < covered.operators and 0 < covered.of_bytes < 1
    joint = [s for s in report.substitutions if s.graph == "joint"]
    assert covered.operators == apart + sum(s.replaced_operators - s.new_operators for s in joint)


def test_a_report_says_with_what_where_and_when_and_why_graphs_break():
    def fn(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    report = fusebackend.explain(torch.compile(fn, backend="fuse", options={"fuse.gate": "measure"}), torch.randn(8))
    assert report.context["torch"] == torch.__version__ and report.context["device"].startswith("cpu: ")
    assert report.context["options"] == "fuse.gate='measure'" and report.context["date"].endswith(" UTC")
    (broken,) = report.breaks
    assert "graph_break" in broken.reason and broken.source.file == __file__ and broken.source.function == "fn"
    assert "graph breaks: 1" in str(report) and f"torch {torch.__version__}" in str(report)


@pytest.mark.parametrize(
    ("paths", "short"),
    [
        ([], ""),
        (["", ""], ""),
        (["a.b"], "a.b"),
        ([f"layers.{i}.mixer" for i in (0, 1, 2, 4, 11)], "layers.0-2,4,11.mixer"),
        (["layers.0.a", "layers.0.b", "layers.1.a"], "layers.0-1.a, layers.0.b"),
        (["a", "b", "c", "d"], "a, b, 2 more"),
        (["layers.00.x", "layers.²"], "layers.00.x, layers.²"),
    ],
)
def test_module_paths_are_condensed(paths, short):
    assert condensed(paths) == short


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("L['self']._modules['layers']._modules['3']._parameters['weight']", "layers.3.weight"),
        ("L['self'].layers.3.mixer", "layers.3.mixer"),
        ("L['self']", ""),
        ("L['batch']['tokens']", "batch['tokens']"),
        ("G['model']._modules['a b']._buffers['mean']", "model.a b.mean"),
        ("L['x'].size()[0]", "x.size()[0]"),
    ],
)
def test_dynamos_places_are_read_as_paths(place, path):
    assert readable_path(place) == path


def test_the_gain_of_a_site_is_not_that_of_another_in_the_same_line():
    source = Source("model.py", 7, "forward", "x = x.mul(gamma)")
    made = Substitution("p", "backward", source, ("a",), ("b",), (), (), "sum_1", module="m", inductor_us=100.0, estimated_us=50.0)
    slower, faster = (
        Verdict("p", "backward", source, kept, 1.0, gain, "measured", "m", node)
        for kept, gain, node in ((False, 0.58, "sum_1"), (True, 3.0, "sum_2"))
    )
    assert Gains(Report([made], [], verdicts=[slower, faster])).of(made) == "~2.00x"
    assert Gains(Report([made], [], verdicts=[dataclasses.replace(faster, node="sum_1"), slower])).of(made) == "3.00x"
    assert Gains(Report([made], [], verdicts=[dataclasses.replace(faster, node="")])).of(made) == "3.00x", "of a report that names no node"


def test_two_reports_are_compared():
    def report(gain=None, substituted=True, reason="why"):
        source = Source("model.py", 7 if substituted else 9, "forward", "x")
        site = {"node": "n", "module": "layers.0"}
        made = Substitution("p", "0: forward", source, ("a",), ("b",), (), (), **site) if substituted else None
        missed = [Rejection("p", "forward", source, "no", **site)] if not substituted else []
        missed.append(Rejection("q", "forward", source, reason, **site))
        verdicts = [Verdict("p", "forward", source, True, 1.0, gain, "measured", "layers.0")] if gain else []
        return Report([made] if made else [], missed, verdicts=verdicts, context={"torch": "2"})

    assert str(compare(report(), report())) == "no site changed"
    (change,) = compare(report(), report(substituted=False)).changes
    assert (change.what, change.pattern, change.modules, change.after) == ("no longer substituted", "p", "layers.0", "no")
    (change,) = compare(report(substituted=False), report()).changes
    assert change.what == "substituted now"
    (change,) = compare(report(), report(reason="other")).changes
    assert (change.what, change.before, change.after) == ("other reason", "why", "other")
    (change,) = compare(report(gain=1.5), report(gain=3.0)).changes
    assert change.what == "other time" and "1.5 ms" in change.before and "3 ms" in change.after
    assert compare(report(gain=1.5), report()).changes == []


def test_a_report_that_was_read_before_the_backward_was_compiled_shows_it_afterwards():
    x, y = torch.randn(8, 6, requires_grad=True), torch.randn(6, 8)
    out = torch.compile(lambda x, y: ((x.t() + y) @ x).sum(), backend="fuse", options={"fuse.interpret": True})(x, y)
    report = fusebackend.last_report()
    assert [c.name for c in report.graphs] == ["forward"]
    seconds = report.seconds
    out.backward()
    assert fusebackend.last_report() is report
    assert [c.name for c in report.graphs] == ["forward", "backward"] and report.seconds > seconds


SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, fusebackend
    from torch._dynamo.utils import counters
    options = json.loads(sys.argv[1])

    def fn(x, w):
        return (x.t() + w) @ x

    x, w = torch.randn(32, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    torch.compile(fn, backend="fuse", options=options)(x, w).backward(torch.ones(16, 16))  # no loop for Inductor to compile
    report = fusebackend.last_report()
    print(json.dumps({
        "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "report": report.to_dict(),
    }))
    """
)


@pytest.mark.codegen
def test_a_second_process_takes_code_and_report_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(options):
        done = subprocess.run([sys.executable, script, json.dumps(options)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm, other = run({"fuse.gate": "off"}), run({"fuse.gate": "off"}), run({"fuse.patterns": []})
    assert cold["hits"] == 0 and not cold["report"]["from_cache"]
    assert warm["hits"] >= 1 and warm["misses"] == 0
    assert warm["report"]["from_cache"]
    assert len(cold["report"]["substitutions"]) == 1
    for what in ("substitutions", "rejections", "graphs"):
        assert warm["report"][what] == cold["report"][what]
    assert other["hits"] == 0 and not other["report"]["substitutions"]


@pytest.mark.codegen
def test_a_dynamic_graph_taken_from_the_cache_at_another_size_has_its_report(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fn = torch.compile(lambda x, y: y + x.t(), backend="fuse", dynamic=True, options={"fuse.gate": "off"})
    for rows, columns in [(64, 32), (128, 40)]:
        torch._dynamo.reset()
        fn(torch.randn(rows, columns), torch.randn(columns, rows))
        assert fusebackend.last_report().counts() == {"transpose_add": 1}
    assert fusebackend.last_report().from_cache


class Faulty(fusebackend.Pattern):
    name = "test_faulty"
    anchors = (torch.ops.aten.sin.default,)

    def match(self, node):
        raise ZeroDivisionError("of the pattern")


@pytest.mark.codegen
def test_strict_raises_also_where_code_was_kept_without_it(tmp_path, monkeypatch, temporary_pattern):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    temporary_pattern(Faulty())
    torch.compile(torch.sin, backend="fuse")(torch.ones(7, 9))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="of the pattern"):
        torch.compile(torch.sin, backend="fuse", options={"fuse.strict": True})(torch.ones(7, 9))


@pytest.mark.codegen
def test_a_program_whose_code_inductor_has_of_another_program_keeps_its_report(tmp_path, monkeypatch):
    """Behind our pass both are the same call: Inductor compiles the first alone, and the second's report is known to nobody else."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, w = torch.randn(2, 8, 20, requires_grad=True), torch.randn(8, 1, 4, requires_grad=True)
    options = {"fuse.gate": "off"}
    sliced = torch.compile(lambda x, w: F.silu(F.conv1d(x, w, padding=3, groups=8)[..., :20]), backend="fuse", options=options)
    padded = torch.compile(lambda x, w: F.silu(F.conv1d(F.pad(x, (3, 0)), w, groups=8)), backend="fuse", options=options)
    for fn in (sliced, padded, padded):
        torch._dynamo.reset()
        torch.autograd.grad(fn(x, w), (x, w), torch.ones_like(x))
        assert fusebackend.last_report().counts() == {"causal_conv1d": 1, "causal_conv1d_backward": 1}
    assert fusebackend.last_report().from_cache


@pytest.mark.codegen
@pytest.mark.parametrize("grad", [False, True])
def test_code_of_another_program_comes_with_what_was_done_to_it(tmp_path, monkeypatch, grad):
    """Names are a part of what Dynamo gives, and none of what Inductor's key is made of."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, w = torch.randn(32, 16, requires_grad=grad), torch.randn(16, 32, requires_grad=grad)

    def first(x, w):
        return (x.t() + w) @ x

    def second(inputs, weight):
        total = inputs.t() + weight
        return total @ inputs

    reports = []
    for fn in (first, second):
        out = torch.compile(fn, backend="fuse", options={"fuse.gate": "off"})(x, w)
        if grad:
            out.sum().backward()
        reports.append(fusebackend.last_report())
    cold, warm = reports
    assert not cold.from_cache and warm.from_cache and not warm.notes
    assert warm.counts() == cold.counts() == {"transpose_add": 1}
    assert [c.name for c in warm.graphs] == [c.name for c in cold.graphs] and len(warm.graphs) == 1 + grad
    assert warm.substitutions[0].source.elsewhere and not cold.substitutions[0].source.elsewhere


@pytest.mark.codegen
def test_options_that_say_the_same_in_other_words_have_one_report(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, w = torch.randn(32, 16), torch.randn(16, 32)
    for i, words in enumerate([{}, {"mode": "default"}, {"max_autotune": torch._inductor.config.max_autotune}]):
        torch._dynamo.reset()
        torch.compile(lambda x, w: (x.t() + w) @ x, backend="fuse", options={"fuse.gate": "off", **words})(x, w)
        report = fusebackend.last_report()
        assert report.counts() == {"transpose_add": 1} and report.from_cache == (i > 0) and not report.notes


@pytest.mark.codegen
def test_code_that_was_decided_on_at_other_magnitudes_is_not_taken_from_the_cache(tmp_path, monkeypatch):
    """As if Inductor took its time by rows, and we by elements: long rows are left to it; the graph and its guards are the same."""
    free, date = dict.fromkeys(("bytes", "elements", "runs"), math.inf), "2026-01-01"
    models = {"transpose_add cpu": TimeModel(0.0, {**free, "elements": 20.0}, 1.0), "sum cpu": TimeModel(0.0, {**free, "runs": 1.0}, 1.0)}
    known = calibration.Calibration("a stand-in", torch.__version__, date, 0, models, {})
    monkeypatch.setattr(calibration, "of_device", lambda device: known)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fn = torch.compile(lambda x, y: y + x.t(), backend="fuse", dynamic=True)
    for rows, columns, counts in [(20000, 200, {}), (20000, 3, {"transpose_add": 1}), (21000, 210, {})]:
        torch._dynamo.reset()
        fn(torch.randn(rows, columns), torch.randn(columns, rows))
        assert fusebackend.last_report().counts() == counts
    assert fusebackend.last_report().from_cache


@pytest.mark.codegen
def test_a_kept_report_says_whose_lines_it_names_and_is_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_LOGS", "+fusebackend")
    program = SCRIPT.replace("print(", "print(report)\nprint(")
    (tmp_path / "first.py").write_text(program)
    (tmp_path / "second.py").write_text("# the same graph, one line further down\n" + program)

    def run(name):
        done = subprocess.run([sys.executable, tmp_path / name, '{"fuse.gate": "off"}'], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    first, again, second = run("first.py"), run("first.py"), run("second.py")
    assert "from the cache" not in first.stdout and "from the cache" in again.stdout and "from the cache" in second.stdout
    assert "another program" not in first.stdout + again.stdout
    assert "first.py:7 (another program's)" in second.stdout
    assert "another program" not in run("first.py").stdout, "they are its own again"
    for done in (again, second):
        (line,) = [x for x in done.stderr.splitlines() if "transpose_add in forward at first.py:7" in x]
        assert "(code from Inductor's cache)" in line
