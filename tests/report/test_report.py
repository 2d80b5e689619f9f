"""explain and the reports of real compiles."""

import inspect
import json
import subprocess
import sys
import textwrap
from typing import get_args

import pytest
import torch
from torch import nn

import fusebackend
from fusebackend.report.model import Report
from fusebackend.rewriting.pattern import Code


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


def test_explain_gives_reasons_and_counts_graph_breaks():
    def fn(x, y):
        a = torch.relu(x.t() + y)
        torch._dynamo.graph_break()
        return x.t().double() + y.double(), a

    report = fusebackend.explain(fn, torch.randn(8, 6), torch.randn(6, 8))
    assert len(report.graphs) == 2 and all(c.before and c.after for c in report.graphs)
    assert any("Inductor fuses it with its neighbour aten.relu" in r.reason for r in report.rejections)
    assert all(r.source.file == __file__ for r in report.rejections)


def test_explain_takes_what_torch_compile_returned():
    compiled = torch.compile(lambda x, y: x.t() + y, backend="fuse", dynamic=True, options={"fuse.patterns": []})
    assert not fusebackend.explain(compiled, torch.randn(8, 6), torch.randn(6, 8)).substitutions


def test_explain_says_when_nothing_was_compiled():
    assert "nothing was compiled" in str(fusebackend.explain(lambda: 3))
    with pytest.raises(TypeError, match="fn_or_module must be callable, got int"):
        fusebackend.explain(3)


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


@pytest.mark.codegen
def test_code_that_was_decided_on_at_other_magnitudes_is_not_taken_from_the_cache(tmp_path, monkeypatch):
    """Long rows are left to Inductor on a CPU, and short ones are not; the graph and its guards are the same."""
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
