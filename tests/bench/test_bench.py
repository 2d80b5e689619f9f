"""``python -m fusebackend bench``: what it takes, measures, prints and writes. No figure is judged here."""

import dataclasses
import functools
import json
import subprocess
import sys
import types

import pytest
import torch

from fusebackend.__main__ import main
from fusebackend.bench import Case, compile_time, kernels, model_steps, plots, pool, random_shapes, results
from fusebackend.rewriting.registry import families

CPU = torch.device("cpu")

# Every way without code generation: what is tested is the bench, not Inductor.
QUICK_WAYS = {
    "eager": None,
    "inductor": {"backend": "eager"},
    "fuse": {"backend": "fuse", "options": {"fuse.interpret": True, "fuse.gate": "off"}},
}


def square_inputs(device):
    return torch.randn(33, 70, device=device), torch.randn(70, 33, device=device)


@pytest.fixture
def family(monkeypatch):
    """Makes the bench know one family, with the cases given, and only quick ways."""

    def use(*cases, drawn=None):
        bench = types.SimpleNamespace(cases=lambda: list(cases), random_cases=drawn)
        for module in (kernels, random_shapes):
            monkeypatch.setattr(module, "families", lambda: {"tiny": types.SimpleNamespace(bench=bench)})
        monkeypatch.setattr(kernels, "WAYS", QUICK_WAYS)

    return use


TRANSPOSED = Case("transposed", lambda x, y: x.T + y, square_inputs, floor=lambda x, y: y + y, goal=1e9)


def row_of(case, family):
    family(case)
    return kernels.Prepared(case, tuple(QUICK_WAYS), CPU).measure()


# ---- arguments ----


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["kernels", "--family", "transposed"], "--family takes"),
        (["kernels", "--ways", "eager,fast"], "--ways takes"),
        (["kernels", "--case", "no such case"], "no case has 'no such case'"),
        (["kernels", "--family", "transpose_add", "--output", "/no/such/folder/f.json"], "there is no folder"),
        (["models", "--model", "gpt5"], "--model takes"),
        (["models", "--kind", "training-fp8"], "--kind takes"),
        (["models", "--steps", "0"], "--steps takes"),
        (["models", "--patterns", "no_such_pattern"], "no_such_pattern"),
        (["models", "--option", "fuse.strict"], "NAME=VALUE"),
        (["compile", "--graph", "resnet"], "--graph takes"),
        (["compile", "--repeats", "0"], "--repeats takes"),
        (["table", "/no/such/file.json"], "/no/such/file.json"),
    ],
)
def test_wrong_arguments_are_told_in_a_line_before_any_work(arguments, said, capsys, monkeypatch):
    def begins(*_, **__):
        yield pytest.fail("work began")

    monkeypatch.setattr(pool, "run", begins)
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("fusebackend: ") and error.count("\n") == 1


# ---- kernels ----


def test_a_run_prints_a_row_and_writes_json_which_becomes_a_table(family, tmp_path, capsys):
    family(TRANSPOSED)
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "tiny: transposed" in printed and "1 of 1 goals reached" in printed
    data = json.loads(file.read_text())
    assert {"device", "torch", "commit", "date", "library"} <= set(data["environment"])
    (row,) = data["kernels"]
    assert row["substitutions"] == {"fuse": 1} and set(row["ms"]) == {"floor", *QUICK_WAYS} and row["wrong"] == []
    assert main(["bench", "table", str(file)]) == 0
    table = capsys.readouterr().out
    assert "| transposed |" in table and "× floor (≤ 1e+09)" in table and data["environment"]["torch"] in table


def test_what_was_not_substituted_is_said(family):
    row = row_of(Case("plain", lambda x, y: x + 1, square_inputs), family)
    assert row["substitutions"] == {"fuse": 0}
    assert "NOT SUBSTITUTED in fuse" in kernels.line({"family": "tiny", "case": "plain", **row})


def test_a_wrong_result_is_said_and_fails_the_run(family, monkeypatch, capsys):
    family(TRANSPOSED)

    def slightly_wrong(gm, inputs):
        return lambda *args: [out * (1 + 1e-3) for out in gm(*args)]

    monkeypatch.setitem(kernels.WAYS, "fuse", {"backend": slightly_wrong})
    assert main(["bench", "kernels"]) == 1
    assert "WRONG in fuse: error 1.0e-03" in capsys.readouterr().out


def test_one_way_that_fails_does_not_hide_the_others(family, monkeypatch):
    def broken(gm, inputs):
        raise RuntimeError("no kernel today")

    family(TRANSPOSED)
    monkeypatch.setitem(kernels.WAYS, "inductor", {"backend": broken})
    row = kernels.Prepared(TRANSPOSED, tuple(QUICK_WAYS), CPU).measure()
    assert "no kernel today" in row["failed"]["inductor"] and set(row["ms"]) == {"floor", "eager", "fuse"}


def test_a_backward_is_timed_and_compared_by_its_gradients(family, monkeypatch):
    timed = []
    monkeypatch.setattr(kernels, "median_ms", lambda fn, device: timed.append(fn()) or 1.0)
    case = Case("backward", lambda x, w: (x * w).sin().sum(0), lambda d: (torch.randn(4, 5), torch.randn(5)), backward=(1,))
    row = row_of(case, family)
    assert [tuple(g.shape for g in out) for out in timed] == [((5,),)] * 3
    assert row["wrong"] == [] and 0 < row["error"]["eager"] < 1e-6


def test_an_in_place_function_is_compared_by_its_arguments(family):
    def accumulate(x, y):
        x.add_(y.T)

    row = row_of(Case("in place", accumulate, square_inputs), family)
    assert row["wrong"] == [] and row["error"]["fuse"] < 1e-6


def test_peers_and_goals_are_columns(family):
    case = Case(
        "peer",
        lambda x, y: x.T + y,
        square_inputs,
        peers={"double": lambda x, y: functools.partial(torch.add, x.double().T, y.double())},
        goals={"double": 1e-9, "ms": 1e9},
    )
    row = row_of(case, family)
    assert [(column, goal) for column, _, goal in results.goals(row)] == [("double", 1e-9), ("ms", 1e9)]
    printed = kernels.line({"family": "tiny", "case": "peer", **row})
    assert "1e-09, missed" in printed and "double" in printed


def test_determinism_is_set_for_the_case_alone(family):
    seen = []
    case = Case(
        "determinism", lambda x, y: seen.append(torch.are_deterministic_algorithms_enabled()) or x, square_inputs, deterministic=True
    )
    family(case)
    kernels.Prepared(case, ("eager",), CPU).measure()
    assert seen and all(seen) and not torch.are_deterministic_algorithms_enabled()


def test_each_way_has_compiled_code_of_its_own():
    compiles = []

    def counted(gm, inputs):
        compiles.append(gm)
        return gm

    for name in "ab":
        torch.compile(kernels._separate(lambda x: x + 1, name), backend=counted)(torch.ones(3))
    assert len(compiles) == 2


def test_a_case_may_name_the_ways_that_say_something_new(family):
    row = row_of(dataclasses.replace(TRANSPOSED, ways=("eager",)), family)
    assert set(row["ms"]) == {"eager", "floor"} and not row["failed"]


def test_random_shapes_come_from_the_family_and_the_seed(family, tmp_path, capsys, monkeypatch):
    def drawn(draw, scale):
        for _ in range(9):
            yield Case(f"{draw.randrange(2**30)}", lambda x, y: x.T + y, square_inputs)

    family(TRANSPOSED, drawn=drawn)
    file = tmp_path / "random.json"
    assert main(["bench", "kernels", "--random", "2", "--seed", "7", "--output", str(file)]) == 0
    assert [row["case"] for row in json.loads(file.read_text())["random"]] == [c.name for c in random_shapes.cases("tiny", 2, 7)]


@pytest.mark.parametrize("name", sorted(families()))
def test_random_shapes_are_the_same_for_a_seed_and_run(name):
    drawn = random_shapes.cases(name, 30, seed=3)
    assert [c.name for c in drawn] == [c.name for c in random_shapes.cases(name, 30, seed=3)] and len({c.name for c in drawn}) == 30
    for case in drawn[:6]:
        arguments = case.inputs(CPU)
        if case.floor is not None:
            case.floor(*arguments)
        result = case.fn(*arguments)
        if case.backward:
            torch.autograd.grad(result.sum(), [arguments[i] for i in case.backward if arguments[i].requires_grad])


# ---- models ----


def small_factory():
    return torch.nn.Linear(4, 4), (torch.randn(3, 4),)


def test_a_users_own_model_is_timed_in_every_kind(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model_steps, "in_turn", lambda steps, device: {way: [len(str(step()))] * 3 for way, step in steps.items()})
    file = tmp_path / "models.json"
    own = f"{__name__}:small_factory"
    arguments = ["--model", own, "--kind", "training-fp32", "--kind", "inference-bf16", "--option", "fuse.interpret=True"]
    assert main(["bench", "models", *arguments, "--patterns=-transpose_add", "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["models"]
    assert [(r["model"], r["kind"]) for r in rows] == [(own, "training-fp32"), (own, "inference-bf16")]
    assert all(r["difference"] < 1e-5 and r["substitutions"] == {} for r in rows)
    assert "training-fp32: geometric mean" in capsys.readouterr().out


def test_losses_are_those_of_steps_down_the_gradient_and_the_model_is_as_before():
    subject = model_steps.Subject(f"{__name__}:small_factory", "training-fp32", CPU)
    start = {k: v.clone() for k, v in subject.model.state_dict().items()}
    losses = model_steps._results(subject, lambda: _eager_step(subject), start, steps=4)
    assert all(a > b for a, b in zip(losses, losses[1:]))
    assert all(torch.equal(v, start[k]) for k, v in subject.model.state_dict().items())


def _eager_step(subject):
    subject.model.zero_grad()
    loss = model_steps._loss(subject.model(*subject.args))
    loss.backward()
    return loss.detach()


def test_losses_begin_at_the_same_weights_where_memory_ran_out_on_the_way(monkeypatch):
    monkeypatch.setattr(pool.time, "sleep", lambda seconds: None)
    subject, calls = model_steps.Subject(f"{__name__}:small_factory", "training-fp32", CPU), []
    start = {k: v.clone() for k, v in subject.model.state_dict().items()}

    def step():
        calls.append(None)
        if len(calls) in (2, 4):  # of the first and the second attempt
            raise torch.OutOfMemoryError
        subject.model.zero_grad()
        loss = subject.model(*subject.args).square().mean()
        loss.backward()
        return loss.detach()

    disturbed = pool.patiently(model_steps._results, subject, step, start, 3)
    assert len(calls) == 2 + 2 + 3 and disturbed == pool.patiently(model_steps._results, subject, step, start, 3)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["bench", "models", "--model", "swin_b", "--kind", "inference-fp32"]) == 1
    assert "timm" in (said := capsys.readouterr().out) and "pip install 'fusebackend[models]'" in said


@pytest.mark.parametrize("name", model_steps.CPU_MODELS)
def test_the_models_for_a_cpu_hold_what_is_looked_for(name):
    import fusebackend

    report = fusebackend.explain(model_steps.MODELS[name](CPU)[0], *model_steps.MODELS[name](CPU)[1])
    assert report.substitutions


# ---- compile ----


def test_compiles_are_compared_in_pairs_cold_and_warm(monkeypatch, capsys, tmp_path):
    seconds = {"inductor": [10.0, 1.0, 1.0], "fuse": [11.0, 1.0, 1.0]}
    monkeypatch.setattr(
        compile_time, "_cold_and_warm", lambda graph, way: [{"s": s, "ours": 0.1, "substitutions": 2} for s in seconds[way]]
    )
    file = tmp_path / "compile.json"
    assert main(["bench", "compile", "--graph", "byte_lm", "--repeats", "2", "--output", str(file)]) == 0
    cold, warm = json.loads(file.read_text())["compile"]
    assert (cold["cache"], cold["ratio"], warm["cache"], warm["ratio"]) == ("cold", 1.1, "warm", 1.0)
    assert main(["bench", "table", str(file)]) == 0
    assert "| byte_lm training | cold | 10.00 s | 11.00 s | 1.10× |" in capsys.readouterr().out


def test_a_compile_that_fails_is_told(monkeypatch, capsys):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback ...\nRuntimeError: no compiler\n")

    monkeypatch.setattr(compile_time.subprocess, "run", fails)
    assert main(["bench", "compile", "--graph", "byte_lm", "--repeats", "1"]) == 1
    assert "byte_lm training cold" in (said := capsys.readouterr().out) and "RuntimeError: no compiler" in said


# ---- results ----


def a_run(ratio=2.0, **environment):
    model = {"model": "gpt2_small", "kind": "training-fp32", "ms": {"inductor": 10.0 * ratio, "fuse": 10.0}, "ratio": ratio, "goal": 1.5}
    row = {"family": "tiny", "case": "c", "goals": {"floor": 1.05}, "ms": {"floor": 1.0, "inductor": ratio, "fuse": 1.0}}
    return {
        "environment": {"device": "a device", "torch": "2.11", **environment},
        "kernels": [{**row, "substitutions": {"fuse": 1}, "error": {}, "failed": {}}],
        "random": [{**row, "substitutions": {"fuse": 1}, "error": {}, "failed": {}}],
        "models": [{**model, "uncertainty": 0.001, "difference": 0.0, "substitutions": {"fp32_matmul": 9}}],
    }


def written(path, data):
    results.write(path, data)
    return str(path)


def test_only_what_changed_by_more_than_three_percent_is_listed(tmp_path, capsys):
    old, new = written(tmp_path / "old.json", a_run(2.0)), a_run(2.05, torch="2.12")
    new["models"][0]["ratio"] = 1.8
    assert main(["bench", "table", written(tmp_path / "new.json", new), "--compare", old]) == 0
    said = capsys.readouterr().out
    assert "gpt2_small training-fp32: inductor / fuse 2.000 -> 1.800 (-10.0 %)" in said
    assert "tiny c" not in said and "not the same torch: 2.11 before, 2.12 now" in said and "3 ratios compared" in said


def test_rows_of_one_run_only_are_listed(tmp_path):
    old, new = a_run(), a_run()
    old["models"][0]["model"] = "gpt1"
    assert {"gpt1 training-fp32: not measured now", "gpt2_small training-fp32: new"} <= set(results.changes(new, old).splitlines())


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text('{"some": "thing"}')
    assert main(["bench", "table", str(path)]) == 1
    assert "no result of `python -m fusebackend bench`" in capsys.readouterr().err


def test_several_files_are_one_run_if_they_are_of_one_machine_and_commit(tmp_path, capsys):
    parts = [{k: a_run()[k] for k in ("environment", section)} for section in ("kernels", "models")]
    files = [written(tmp_path / f"{i}.json", part) for i, part in enumerate(parts)]
    assert main(["bench", "table", *files]) == 0
    table = capsys.readouterr().out
    assert table.count("a device") == 1 and "`tiny`" in table and "gpt2_small" in table
    other = written(tmp_path / "other.json", a_run(device="another"))
    assert main(["bench", "table", files[0], other]) == 1
    assert "more than one device: a device and another" in capsys.readouterr().err


def test_the_models_table_has_a_column_a_kind_and_geometric_means(tmp_path, capsys):
    data = a_run(2.0)
    data["models"] += [
        {**data["models"][0], "model": "swin_b", "ratio": 8.0},
        {"model": "x", "kind": "training-fp32", "failure": "no timm"},
    ]
    assert main(["bench", "table", written(tmp_path / "run.json", data)]) == 0
    table = capsys.readouterr().out
    assert "| gpt2_small | 20.0 → 10.0 ms, **2.00×** (≥ 1.5) | fp32_matmul 9 |" in table
    assert "| geometric mean | **4.00×** |" in table and "| x |" not in table


# ---- plots ----


def test_plots_are_drawn_from_what_a_run_has(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = written(tmp_path / "run.json", a_run())
    assert main(["bench", "plot", file, "--plots", str(tmp_path / "plots")]) == 0
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"families.png", "models.png", "random.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "plots").iterdir())


def test_random_shapes_are_drawn_against_their_floor_alone_too(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = [{"family": "tiny", "case": str(t), "ms": {"floor": 1.0, "kernel": t, "fuse": 9.0}} for t in (1.0, 1.2, 1.4)]
    file = written(tmp_path / "run.json", {**a_run(), "random": rows})
    assert main(["bench", "plot", file, "--plots", str(tmp_path / "plots")]) == 0
    assert "random.png" in {p.name for p in (tmp_path / "plots").iterdir()}
    assert "tiny: 1.200 times the floor's time on average; 1 of 3 below 0.8 of its speed" in results.summary("random", rows)


def test_without_matplotlib_the_extra_is_named_and_the_rest_still_comes(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    family(TRANSPOSED)
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--output", str(file), "--plots", str(tmp_path / "plots")]) == 0
    said = capsys.readouterr()
    assert "tiny: transposed" in said.out and json.loads(file.read_text())["kernels"]
    assert "pip install 'fusebackend[bench]'" in said.err
    with pytest.raises(plots.MissingExtra):
        plots.draw(a_run(), tmp_path)
