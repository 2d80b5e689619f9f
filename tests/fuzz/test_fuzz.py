"""The fuzzer finds nothing wrong in a short run, finds a fault that is planted, and what it found once stays right."""

import ast
import contextlib
import dataclasses
import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis", reason="the test extra is not installed")

from fusebackend.fuzz import compare, execution, random_programs, run  # noqa: E402
from fusebackend.fuzz.builder import Builder  # noqa: E402
from fusebackend.fuzz.compare import check  # noqa: E402
from fusebackend.fuzz.programs import TYPES, Program  # noqa: E402
from fusebackend.fuzz.steps import convert  # noqa: E402
from fusebackend.fuzz.tensors import Spec  # noqa: E402
from fusebackend.patterns.transpose_add import fuzz as transpose_add  # noqa: E402
from fusebackend.rewriting.pattern import Emitter  # noqa: E402

SEED, COUNT = 0, 120

#: Programs that were computed or judged wrongly once: what they show -> the smallest one that did.
FOUND = {
    "a sum in float32 that overflows in eager's order alone": Program(
        inputs=(Spec((100, 3, 3, 3), fill="scales", grad="leaf"),),
        body=("v0 = x0.to(f32)", "v1 = v0.sum((0, 1, 2))"),
        outputs=("v1",),
    ),
    "gradients of 0 that eager rounds to 0 on its way": Program(
        inputs=(
            Spec((17, 16), torch.float16, seed=2, grad="leaf"),
            Spec((17, 16), torch.float16, expanded=(0,), seed=3, grad="leaf"),
        ),
        body=("v0 = x0 * 0.25", "v1 = v0 @ x1.transpose(-2, -1)", "v2 = F.softmax(v1.to(f32), dim=-1).type_as(x1)", "v3 = v2 @ x1"),
        outputs=("v3",),
    ),
    "a padding index that is computed from symbolic sizes": Program(
        inputs=(Spec((3, 3), grad="leaf"), Spec((7,), torch.int64, fill="index", bound=3, seed=1)),
        body=("v0 = F.embedding(x1, x0, padding_idx=-1)",),
        outputs=("v0",),
        path="dynamic",
        sizes=((3, 6), (7, 9)),
    ),
    "a copy of a mutated input is no alias of it": Program(
        inputs=(
            Spec((3, 3), torch.int64),
            Spec((5,), torch.int64, fill="index", bound=3, seed=1),
            Spec((5, 3), torch.int64, seed=2),
        ),
        body=("v0 = x0.index_add_(0, x1, x2)", "v1 = v0.clone()"),
        outputs=("v1",),
    ),
    "a backward gets the input as it was before it was mutated": Program(
        inputs=(Spec((2, 4, 9)), Spec((4, 1, 4), seed=1, grad="leaf"), Spec((2, 4, 9), seed=2)),
        body=("v0 = F.conv1d(F.pad(x0, (3, 0)), x1, groups=4)", "x0.add_(x2)"),
        outputs=("v0",),
    ),
    "and so when the mutated input has a gradient": Program(
        inputs=(Spec((2, 4, 9), grad="inner"), Spec((4, 1, 4), seed=1, grad="leaf"), Spec((2, 4, 9), seed=2)),
        body=("v0 = F.conv1d(F.pad(x0, (3, 0)), x1, groups=4)", "x0.add_(x2)"),
        outputs=("v0",),
    ),
    "a gather refuses what indexing counts from the end": Program(
        inputs=(
            Spec((4, 3)),
            Spec((6,), torch.int64, fill="index", bound=4, seed=2),
            Spec((7, 3)),
            Spec((6,), torch.int64, fill="bad index", bound=7, seed=3),
        ),
        body=("v0 = torch.zeros_like(x0).index_add(0, x1, x2.gather(0, x3.view(-1, 1).expand(6, 3)))",),
        outputs=("v0",),
    ),
    "an index of several dims onto empty rows": Program(
        inputs=(Spec((3, 0)), Spec((8, 2), torch.int64, fill="index", bound=3, seed=1), Spec((8, 2, 0), seed=2)),
        body=("v0 = x0.index_put((x1,), x2, accumulate=True)",),
        outputs=("v0",),
    ),
    "an index that is expanded along the indexed dim": Program(
        inputs=(Spec((4, 8)), Spec((1, 1), torch.int64, fill="index", bound=4, seed=1), Spec((30, 8), seed=2)),
        body=("v0 = x0.scatter_add(0, x1.expand(30, 8), x2)",),
        outputs=("v0",),
    ),
    "factors whose product overflows": Program(
        inputs=(
            Spec((4, 8)),
            Spec((6,), torch.int64, fill="index", bound=4, seed=1),
            Spec((6, 8), fill="scales", seed=2),
            Spec((6, 1), fill="scales", seed=3),
        ),
        body=("v0 = x0.index_add(0, x1, x2 * 1e-12 * x3 * 1e12, alpha=1000)",),
        outputs=("v0",),
    ),
    "an index out of range whose rows are masked": Program(
        inputs=(Spec((4, 8)), Spec((6,), torch.int64, fill="bad index", bound=4, seed=1), Spec((6, 8), seed=2)),
        body=("v0 = x0.index_put((x1 - 99,), torch.where((x1 - 99 == -100).view(-1, 1), 0, x2), accumulate=True)",),
        outputs=("v0",),
    ),
    "a product of 16-bit floats that overflows before it is added": Program(
        inputs=(Spec((40, 3), torch.bfloat16, fill="scales"), Spec((3, 40), torch.bfloat16, fill="special", seed=1)),
        body=("v0 = torch.add(x1, x0.mT, alpha=30)",),
        outputs=("v0",),
    ),
    "a copy of a result of which a view is returned too": Program(
        inputs=(Spec((2, 4, 9)), Spec((4, 1, 4), seed=1)),
        body=("v0 = F.conv1d(x0, x1, padding=3, groups=4)", "v1 = v0[..., :9]", "v2 = F.pad(v0, (0, 0))"),
        outputs=("v2", "v1"),
    ),
    "a product that overflows meets the other infinity": Program(
        inputs=(
            Spec((4,), fill="special", grad="leaf"),
            Spec((5,), torch.int64, fill="index", bound=4, seed=1),
            Spec((5,), fill="scales", seed=2, grad="leaf"),
        ),
        body=("v0 = x2 * 1e12", "v1 = x0.index_add(0, x1, v0)"),
        outputs=("v1",),
    ),
    "a product of one row and one column, whose gradient is copied for it": Program(
        inputs=(Spec((2, 2, 1), grad="leaf"), Spec((2, 1, 1), seed=1, grad="leaf"), Spec((2, 2, 1), seed=2, grad="leaf")),
        body=("v0 = x0 @ x1", "v0.add_(x2)"),
        outputs=("v0",),
    ),
    "17 dims": Program(
        inputs=(Spec((2,) * 4 + (1,) * 9 + (2,) * 4),),
        body=(f"v0 = x0.permute({tuple(reversed(range(17)))})", "v1 = v0.contiguous()", "v2 = v0 + x0"),
        outputs=("v1", "v2"),
    ),
    "addmm with alpha 0 does not look at infinities": Program(
        inputs=(Spec((130, 64), fill="special"), Spec((64, 130), fill="special", seed=1), Spec((130,), seed=2)),
        body=("v0 = torch.addmm(x2, x0, x1, beta=2, alpha=0)",),
        outputs=("v0",),
    ),
    "products that overflow in eager's order, and their sum": Program(
        inputs=(Spec((2, 5), fill="integers", seed=3, grad="leaf"), Spec((2, 5), fill="integers", seed=4, grad="leaf")),
        body=("v0 = x0.unsqueeze(1) * 1e-38 * x1.unsqueeze(0) * 1e38", "v1 = v0.sum((2,))"),
        outputs=("v1",),
    ),
    "a mean of which the sum overflows": Program(
        inputs=(Spec((40, 3, 3, 8), torch.float32, fill="scales", grad="leaf"),),
        body=("v0 = x0.mean((0, 1))",),
        outputs=("v0",),
    ),
    "a sum that overflows in eager's order alone": Program(
        inputs=(Spec((8, 96, 3), torch.float32, fill="scales", seed=1),),
        body=("v0 = x0.sum((0, 1))",),
        outputs=("v0",),
    ),
    "a sum that overflows in our order alone": Program(
        inputs=(Spec((2, 4, 2), grad="leaf"), Spec((2, 5, 2), seed=1, grad="leaf")),
        body=("v0 = x0.unsqueeze(2) * 1e-38 * x1.unsqueeze(1) * 1e38", "v1 = v0.sum((0,))"),
        outputs=("v1",),
    ),
    "a sum of tensors without columns, of which none has all rows": Program(
        (Spec((3, 0), torch.float32, grad="leaf"),),
        ("v0 = x0.var((0,), correction=0, keepdim=True)", "v1 = v0.expand(2, -1, -1)", "v1.add_(v1)"),
        ("v1",),
    ),
}


def test_a_short_run_finds_nothing_wrong():
    result = run.fuzz(count=COUNT, start=SEED)
    assert not result.wrong, result.wrong[0]
    assert result.programs >= COUNT - result.skipped
    assert result.substituted > 0.4 * result.programs
    for family in ("causal_conv1d", "causal_conv1d_backward", "index_add", "transpose_add"):
        assert result.families[family], f"{family} did not fire"


def test_a_short_run_as_if_on_a_gpu_finds_nothing_wrong():
    """What GPUs alone have is matched, and computed by references: here also a family that takes nothing on a CPU."""
    result = run.fuzz(count=COUNT, start=SEED, device="imagined")
    assert not result.wrong, result.wrong[0]
    assert result.families["computed_sums"], "it did not fire"


@pytest.mark.parametrize("what", FOUND)
def test_programs_that_were_wrong_once_are_right(what, device):
    if device.type == "cuda" and any(spec.fill == "bad index" for spec in FOUND[what].inputs):
        pytest.skip("on a GPU the assertion ends the process")
    assert not check(FOUND[what], device.type).wrong


@pytest.mark.parametrize("what", FOUND)
def test_programs_that_were_wrong_once_are_right_as_if_on_a_gpu(what):
    assert not check(FOUND[what], "imagined").wrong


def test_a_wrong_replacement_is_found_shrunk_and_saved(monkeypatch, tmp_path):
    call = Emitter.call

    def operands_exchanged(self, target, *args):
        if target is torch.ops.fusebackend.transpose_add.default:
            args = (args[1], args[0], *args[2:])  # alpha meets the wrong one
        return call(self, target, *args)

    monkeypatch.setattr(Emitter, "call", operands_exchanged)
    monkeypatch.setattr(run, "SHRINK_TRIES", 100)  # enough for this one, whichever way the shrinker takes
    monkeypatch.setattr(random_programs, "_cores", lambda device: transpose_add.CORES)
    result = run.fuzz(count=100, start=1, most_failures=1, save_to=tmp_path)
    ((program, comparison, _),) = result.wrong
    assert "values" in comparison.wrong[0]
    assert len(program.body) <= 4 and len(program.inputs) <= 4
    (saved,) = tmp_path.iterdir()
    finished = subprocess.run([sys.executable, saved], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr  # in that process the replacement is right


def test_a_process_that_dies_leaves_the_program_behind(tmp_path):
    script = """if True:
        import os, signal, sys
        from pathlib import Path
        from fusebackend.fuzz import run

        def check(program, *_):
            check.calls = getattr(check, "calls", 0) + 1
            if check.calls == 3:
                print(program.source(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return run.Comparison()

        run.check = check
        run.fuzz(count=5, start=7, save_to=Path(sys.argv[1]))
    """
    died = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    (left,) = tmp_path.iterdir()
    names: dict = {}
    exec(left.read_text(), names)
    assert left.name.startswith("unfinished_cpu_") and "seed 7" in left.read_text()
    assert names["PROGRAM"].source().strip() == died.stdout.strip()


@pytest.mark.parametrize("end, left", [(None, 0), (KeyboardInterrupt, 0), (RuntimeError, 1)])
def test_a_program_that_has_ended_leaves_nothing_behind(monkeypatch, tmp_path, end, left):
    calls = []

    def check(program, *_):
        calls.append(program)
        if end is not None:
            raise end
        return compare.Comparison()

    monkeypatch.setattr(run, "check", check)
    with pytest.raises(end) if end else contextlib.nullcontext():
        run.fuzz(count=2, save_to=tmp_path / "failures")
    assert len(calls) == (1 if end else 2), "nothing runs after a failure"
    assert len(list(tmp_path.glob("failures/*"))) == left
    assert end or not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call", ["x0.index_add_(0, x1, x2)", "torch.ops.aten._unsafe_masked_index_put_accumulate(x0, x1.view(-1, 1) > 0, [x1], x2)"]
)
def test_what_would_end_the_process_is_not_run(call):
    """PyTorch alone fails a device-side assertion on the first, and Inductor's own code for the second writes outside of the tensor."""
    program = Program((Spec((0, 5)), Spec((4,), torch.int64, fill="zeros"), Spec((4, 5))), (f"v0 = {call}",), ("v0",))
    assert not check(program).skipped and not check(program).wrong
    assert check(program, codegen=True).skipped and check(program, "cuda").skipped
    program = dataclasses.replace(program, inputs=(Spec((0, 5)), Spec((0,), torch.int64, fill="zeros"), Spec((0, 5))))
    assert not check(program, codegen=True).skipped


def test_an_index_out_of_range_is_not_run_through_generated_code():
    """Inductor's loops on a CPU may read and write outside of the tensor."""
    program = Program(
        (Spec((3, 5)), Spec((4,), torch.int64, fill="bad index", bound=3), Spec((4, 5))), ("v0 = x0.index_add(0, x1, x2)",), ("v0",)
    )
    assert not check(program).skipped and "out of" in check(program, codegen=True).skipped


def test_a_device_side_assertion_leaves_the_program_behind(monkeypatch, tmp_path):
    def synchronize():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="assert"), run._recorded(FOUND["17 dims"], 1, "cuda", False, tmp_path):
        pass  # check reports what eager raises as a refusal
    assert [path.name.startswith("unfinished_cuda_") for path in tmp_path.iterdir()] == [True]


def test_a_saved_program_is_the_same_when_it_is_loaded(tmp_path):
    for program in FOUND.values():
        names: dict = {}
        exec(program.file("", "cpu", codegen=False), names)
        assert names["PROGRAM"] == program


@pytest.mark.parametrize("gate, substitutions", [("off", {"transpose_add": 1}), ("auto", {})])
def test_the_gate_of_a_program_decides_whether_what_does_not_pay_is_applied(gate, substitutions, library):
    program = Program((Spec((3, 40)), Spec((40, 3), seed=1)), ("v0 = x0.mT + x1", "v1 = v0.sum()"), ("v0", "v1"), gate=gate)
    comparison = check(program)
    assert not comparison.wrong and dict(comparison.counts) == substitutions


def wrote_to_a_copy(conversion):
    """A program whose result float32 can't hold exactly, and which writes to a conversion of a leaf."""
    return Program(
        inputs=(Spec((64,), grad="leaf"), Spec((1, 1, 64), seed=1, grad="leaf"), Spec((1, 1, 1), seed=2, grad="leaf")),
        body=(f"v0 = x0.{conversion}", "v1 = F.conv1d(x1, x2)", "v0.add_(v0)"),
        outputs=("v1", "v0"),
    )


def test_the_program_in_float64_copies_where_the_program_does():
    comparison = check(wrote_to_a_copy("to(f64, copy=True)"))
    assert not comparison.wrong and not comparison.unjudged
    for seed in range(30):
        b = Random(seed)
        for shape in ((3, 4), (4,), (2, 3, 4)):
            b.input(shape, b.pick(tuple(TYPES.values())), fill="normal")
        names = [convert(b) for _ in range(10)]
        program = Program(tuple(b.inputs), tuple(b.body), tuple(filter(None, names)))
        outcomes = [execution.run(program.function(wide), program, "cpu", False, wide) for wide in (False, True)]
        assert outcomes[0].aliases == outcomes[1].aliases, program.source()


class Random(Builder):
    """Draws without Hypothesis."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        super().__init__(None)

    def integer(self, low, high):
        return self._random.randint(low, high)


def check_spoilt(monkeypatch, program, name, spoil):
    """Compares a program of whose results with ``fuse`` one is replaced."""
    compiled = execution.run_compiled

    def spoilt(*args, patterns=("all",)):
        outcomes, counts = compiled(*args, patterns=patterns)
        if patterns:
            outcomes[0].tensors[name] = spoil(outcomes[0].tensors[name])
        return outcomes, counts

    monkeypatch.setattr(compare, "run_compiled", spoilt)
    return check(program)


def test_a_sum_whose_terms_cancel_may_be_off_by_their_roundings_but_not_by_more(monkeypatch):
    """In float64 eager is its own reference, without an error."""
    inputs = (Spec((1, 1, 400), torch.float64, seed=3), Spec((1, 1, 1), torch.float64, seed=100, grad="leaf"))
    program = Program(inputs, ("v0 = F.conv1d(x0, x1)",), ("v0",))  # the gradient of x1 is -0.88, a sum of 400 terms
    eps = torch.finfo(torch.float64).eps
    assert not check_spoilt(monkeypatch, program, "gradient of x1", lambda t: t + 60 * eps).wrong
    assert check_spoilt(monkeypatch, program, "gradient of x1", lambda t: t + 3000 * eps).wrong
    exact = dataclasses.replace(program, inputs=tuple(dataclasses.replace(spec, fill="integers") for spec in inputs))
    assert check_spoilt(monkeypatch, exact, "gradient of x1", lambda t: t + 1e-11).wrong, "integers are not rounded"


def test_what_is_converted_to_float32_is_rounded_as_float32(monkeypatch):
    program = Program((Spec((3, 3, 3), torch.float64),), ("v0 = x0.to(f32)", "v1 = v0.sum((0,))"), ("v1",))
    eps = torch.finfo(torch.float32).eps
    assert not check_spoilt(monkeypatch, program, "output 0", lambda t: t * (1 + eps)).wrong
    assert check_spoilt(monkeypatch, program, "output 0", lambda t: t * (1 + 100 * eps)).wrong


@pytest.mark.parametrize("exact, ours, right", [(2.9e38, 2.9e38, True), (2.9e38, 2.8e38, False), (1e10, 1e10, True), (1e10, 2e10, False)])
def test_where_eager_overflows_the_exact_sum_is_right(exact, ours, right):
    program = Program((Spec((3, 2)),), ("v0 = x0.sum(0)",), ("v0",))
    eager, wide, got = (
        torch.tensor([1.0, x], dtype=d) for x, d in ((math.inf, torch.float32), (exact, torch.float64), (ours, torch.float32))
    )
    assert (compare._error(program, eager, wide, got, 0.0) is None) is right


@pytest.mark.parametrize("exact, eager, ours, right", [(1.0, math.nan, -math.inf, True), (math.nan, math.nan, -math.inf, False)])
def test_where_eager_overflows_infinity_and_nan_are_alike(exact, eager, ours, right):
    """Not where the exact result is none either."""
    program = Program((Spec((3, 1)),), ("v0 = x0.sum(0)",), ("v0",))
    want, wide, got = (torch.tensor([x], dtype=d) for x, d in ((eager, torch.float32), (exact, torch.float64), (ours, torch.float32)))
    assert (compare._error(program, want, wide, got, 0.0) is None) is right


@pytest.mark.parametrize("ours, right", [(5e-7, True), (2e-6, False)])
def test_terms_that_eager_rounds_to_nothing_may_be_there(ours, right):
    program = Program((Spec((2, 2), torch.float16),), ("v0 = x0.sum(0)",), ("v0",))
    want, wide, got = torch.zeros(1).half(), torch.zeros(1).double(), torch.tensor([ours]).half()
    assert (compare._error(program, want, wide, got, 0.0) is None) is right


def test_a_program_that_reads_what_it_writes_tells_nothing():
    index = Spec((5,), torch.int64, fill="index", bound=1, seed=1)
    program = Program((Spec((1,)), index), ("v0 = x0.expand(5)", "v1 = x0.index_add_(0, x1, v0)"), ("v1",))
    assert "reads memory that it is writing" in check(program).skipped
    assert check(dataclasses.replace(program, body=("v0 = x0.expand(5)", "v1 = x0.index_add(0, x1, v0)"))).skipped is None
    assert check(Program((Spec((3, 4)),), ("v0 = F.pad(x0, (1, 1), 'circular')",), ("v0",))).skipped is None, "copies its own ends"


@pytest.mark.parametrize("overflow, right", [(True, True), (False, False)])
def test_infinity_is_right_where_an_order_of_the_sum_overflows(overflow, right):
    program = Program((Spec((3, 1)),), ("v0 = x0.sum(0)",), ("v0",))
    want, wide, got = torch.tensor([1e38]), torch.tensor([1e38], dtype=torch.float64), torch.tensor([math.inf])
    terms = compare._Terms(torch.tensor([overflow]), torch.tensor([5e38], dtype=torch.float64))
    assert (compare._error(program, want, wide, got, 0.0, terms) is None) is right


def test_the_size_of_what_is_added_up():
    program = Program((Spec((2, 3), fill="scales", seed=5, grad="leaf"),), ("v0 = x0.sum(0) * 1e-38",), ("v0",))
    (found,) = compare._terms(program, "cpu")
    x = program.inputs[0].make()[0].detach()
    assert torch.equal(found["output 0"].overflow, ~(x.abs().sum(0) * 1e-38).isfinite())
    torch.testing.assert_close(found["output 0"].size, x.double().abs().sum(0) * 1e-38)
    assert found["gradient of x0"].size.shape == x.shape


def test_a_program_that_draws_random_numbers_tells_nothing():
    """Compiled code, and the program in float64, draw others."""
    state = torch.get_rng_state()
    for draw in ("F.dropout(x0, 0.5)", "torch.rand(x0.shape, generator=torch.Generator())"):
        program = Program((Spec((3, 4)),), (f"v0 = {draw}", "v1 = v0.t().contiguous()"), ("v1",))
        assert "draws random numbers" in check(program).skipped
    assert torch.equal(state, torch.get_rng_state())


def test_where_the_program_in_float64_has_other_shapes_it_is_no_reference():
    """A conversion that is none there gives the tensor itself, whose dims are then exchanged."""
    program = Program((Spec((4, 3)),), ("v0 = x0 + 1.0", "v1 = v0.to(f64)", "v1.t_()"), ("v0", "v1"))
    assert not check(program).wrong


@pytest.mark.parametrize("why, body", [("raises", ("v0 = x0.to(f64)", "v0.add_(v0)")), ("shares", ("v0 = x0.to(f64)",))])
def test_values_without_a_reference_in_float64_are_not_judged(monkeypatch, why, body):
    judged = wrote_to_a_copy("to(f64, copy=True)")
    unjudged = dataclasses.replace(judged, body=(*body, "v1 = F.conv1d(x1, x2)"))
    assert "values" in check_spoilt(monkeypatch, judged, "output 0", lambda t: t * 1.0001).wrong[0]
    comparison = check_spoilt(monkeypatch, unjudged, "output 0", lambda t: t * 1.0001)
    assert why in comparison.unjudged and not comparison.wrong
    assert "dtype" in check_spoilt(monkeypatch, unjudged, "output 0", lambda t: t.double()).wrong[0]
    result = run.Result()
    result.add(unjudged, comparison, codegen=False)
    assert result.unjudged == 1 and "1 whose values were not judged" in str(result)


def test_the_modules_of_the_fuzzer_import_one_another_in_one_direction():
    """Families import ``builder``; what draws from the families imports them through the registry, and is not imported by them."""
    order = ("tensors", "imagined_gpu", "programs", "builder", "steps", "random_programs", "execution", "compare", "run")
    for i, name in enumerate(order):
        tree = ast.parse((Path(run.__file__).parent / f"{name}.py").read_text())
        modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        imported = {module.rpartition(".")[2] for module in modules if module.startswith("fusebackend.fuzz.")}
        assert imported <= set(order[:i]), name
