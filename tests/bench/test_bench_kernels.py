"""``bench kernels``: what it measures, compares, prints and writes. No figure is judged here."""

import dataclasses
import functools
import json

import pytest
import torch
from bench_examples import CPU, QUICK_WAYS, TRANSPOSED, square_inputs

from fusebackend.__main__ import main
from fusebackend.bench import Case, case_lists, kernels, rows
from fusebackend.bench.own_code import with_own_code
from fusebackend.rewriting.registry import families


def row_of(case, family, gate="off"):
    family(case)
    return kernels.Prepared(case, tuple(QUICK_WAYS), CPU, gate).measure()


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


def test_a_way_without_substitutions_is_reported(family):
    row = row_of(Case("plain", lambda x, y: x + 1, square_inputs), family)
    assert row["substitutions"] == {"fuse": 0}
    assert "NOT SUBSTITUTED in fuse" in kernels.line({"family": "tiny", "case": "plain", **row})


def test_a_wrong_result_is_reported_and_fails_the_run(family, monkeypatch, capsys):
    family(TRANSPOSED)

    def slightly_wrong(gm, inputs):
        return lambda *args: [out * (1 + 1e-3) for out in gm(*args)]

    monkeypatch.setitem(kernels.WAYS, "fuse", {"backend": slightly_wrong})
    assert main(["bench", "kernels"]) == 1
    assert "WRONG in fuse: error 1.0e-03" in capsys.readouterr().out


def test_no_code_comes_from_the_caches_which_serve_dynamic_sizes_whatever_they_were_tuned_for(family, monkeypatch):
    seen = []

    def looking(gm, inputs):
        seen.append((torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache))
        return gm

    family(TRANSPOSED)
    monkeypatch.setitem(kernels.WAYS, "inductor", {"backend": looking})
    kernels.Prepared(TRANSPOSED, tuple(QUICK_WAYS), CPU)
    assert seen == [(False, False)]


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


def test_a_gradient_has_the_memory_order_of_the_result(family):
    strides = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            strides.append(grad.stride())
            return 2 * grad * ctx.saved_tensors[0]

    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    case = Case("square", Square.apply, lambda device: (x.detach(),), backward=(0,))
    family(case)
    kernels.Prepared(case, ("eager",), CPU)
    assert set(strides) == {x.stride()}


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
    assert [(column, goal) for column, _, goal in rows.goals(row)] == [("double", 1e-9), ("ms", 1e9)]
    printed = kernels.line({"family": "tiny", "case": "peer", **row})
    assert "1e-09, missed" in printed and "double" in printed


def test_a_peer_that_does_not_support_a_case_hides_nothing_else(family):
    def refuse(*arguments):
        raise NotImplementedError("no gradient of a bias")

    row = row_of(dataclasses.replace(TRANSPOSED, peers={"old": refuse, "copy": lambda x, y: x.clone}), family)
    assert "copy" in row["ms"] and "fuse" in row["ms"] and "old" not in row["ms"]
    assert "no old: " in (printed := kernels.line({"family": "tiny", "case": "peer", **row})) and "no gradient of a bias" in printed


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
        torch.compile(with_own_code(lambda x: x + 1, name), backend=counted)(torch.ones(3))
    assert len(compiles) == 2


def test_a_case_may_name_the_only_ways_to_time(family):
    row = row_of(dataclasses.replace(TRANSPOSED, ways=("eager",)), family)
    assert set(row["ms"]) == {"eager", "floor"} and not row["failed"]


def test_random_shapes_come_from_the_family_and_the_seed(family, tmp_path, capsys, monkeypatch):
    def drawn(draw, scale):
        for _ in range(9):
            yield Case(f"{draw.randrange(2**30)}", lambda x, y: x.T + y, square_inputs)

    family(TRANSPOSED, drawn=drawn)
    file = tmp_path / "random.json"
    assert main(["bench", "kernels", "--random", "2", "--seed", "7", "--output", str(file)]) == 0
    assert [row["case"] for row in json.loads(file.read_text())["random"]] == [c.name for c in case_lists.random_cases("tiny", 2, 7)]


@pytest.mark.parametrize("name", sorted(families()))
def test_random_cases_are_the_same_for_a_seed_and_can_be_called(name):
    drawn = case_lists.random_cases(name, 30, seed=3)
    assert [c.name for c in drawn] == [c.name for c in case_lists.random_cases(name, 30, seed=3)] and len({c.name for c in drawn}) == 30
    for case in drawn[:6]:
        arguments = case.inputs(CPU)
        if case.floor is not None:
            case.floor(*arguments)
        leaves = [arguments[i].requires_grad_() for i in case.backward]
        result = case.fn(*arguments)
        if leaves:
            torch.autograd.grad(result.sum(), leaves)


@pytest.mark.parametrize(
    "arguments, gate",
    [([], "off"), (["--random", "1"], "auto"), (["--gate", "measure"], "measure"), (["--random", "1", "--gate", "off"], "off")],
)
def test_the_gate_is_off_for_tables_and_the_default_for_random_shapes(arguments, gate, family, monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(kernels.torch, "compile", lambda fn, **how: compiled.append(how) or fn)
    family(TRANSPOSED, drawn=lambda draw, scale: iter([TRANSPOSED]))
    file = tmp_path / "run.json"
    assert main(["bench", "kernels", *arguments, "--ways", "inductor,fuse", "--output", str(file)]) == 0
    assert compiled == [QUICK_WAYS["inductor"], {"backend": "fuse", "options": {"fuse.gate": gate, "fuse.interpret": True}}]
    ((row,),) = (content for section, content in json.loads(file.read_text()).items() if section in ("kernels", "random"))
    assert row["gate"] == gate


def test_the_default_gate_leaves_what_does_not_pay_to_inductor(family):
    assert row_of(TRANSPOSED, family, "auto")["substitutions"] == {"fuse": 0}
    assert row_of(TRANSPOSED, family, "off")["substitutions"] == {"fuse": 1}
