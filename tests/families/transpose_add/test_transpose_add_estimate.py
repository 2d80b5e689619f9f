"""Whether a sum pays: what is left to Inductor by default, with the reason, and what ``fuse.gate="off"`` applies all the same."""

import random

import pytest
import torch
from families.tile_tensors import FLOATS, INTEGERS, assert_same_bits, values
from torch import nn

import fusebackend
from fusebackend.patterns.transpose_add.estimate import unmeasured_reason


@pytest.mark.parametrize(
    ("fn", "shapes", "reason"),
    [
        (lambda x, y: x.t().double() + y.double().double(), [(8, 6), (6, 8)], "Inductor fuses it with its neighbour"),
        (lambda x, y: torch.relu(x.t() + y), [(8, 6), (6, 8)], "neighbour aten.relu.default"),
        (lambda x, y: (x.t() + y).sum(0), [(8, 6), (6, 8)], "neighbour aten.sum.dim_IntList"),
        (lambda x, y: x.exp().t() + y, [(8, 6), (6, 8)], "neighbour aten.exp.default"),
        (lambda x, y: x.t() + y.to(memory_format=torch.contiguous_format).sin(), [(8, 6), (6, 8)], "neighbour aten.sin.default"),
    ],
)
def test_a_sum_that_inductor_fuses_stays_with_it(interpreted, fn, shapes, reason):
    inputs = [values(s) for s in shapes]
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "transpose_add", "fuse.gate": "auto"})(*inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    report = fusebackend.last_report()
    assert not report.substitutions
    assert any(reason in r.reason for r in report.rejections), report


@pytest.mark.cuda
def test_small_sums_stay_with_inductor(interpreted):
    compiled = interpreted(lambda x, y: x.t() + y, options={"fuse.gate": "auto"})
    compiled(values((64, 600), device="cuda"), values((600, 64), device="cuda"))
    assert ["153600 bytes" in r.reason for r in fusebackend.last_report().rejections] == [True]


@pytest.mark.parametrize(
    ("shape", "order", "dtype", "dynamic", "reason"),
    [
        ((165, 83, 3), (2, 1, 0), torch.float16, False, None),
        ((165, 83, 3), (2, 1, 0), torch.float32, False, "long"),
        ((3, 83, 165), (2, 1, 0), torch.float32, True, None),
        ((3, 83, 165), (2, 1, 0), torch.float16, False, "long"),
        ((512, 320), (1, 0), torch.bfloat16, False, "long"),
        ((512, 320), (1, 0), torch.bfloat16, True, "long"),
        ((50, 60, 3), (2, 1, 0), torch.float16, False, "9000 elements"),
    ],
)
def test_on_a_cpu_only_sums_of_short_rows_are_proven(interpreted, shape, order, dtype, dynamic, reason):
    x, y = values(shape, dtype=dtype), values(tuple(shape[d] for d in order), dtype=dtype)
    interpreted(lambda x, y: x.permute(order) + y, dynamic=dynamic, options={"fuse.gate": "auto"})(x, y)
    report = fusebackend.last_report()
    assert len(report.substitutions) == (reason is None)
    assert [reason in r.reason and "not timed" in r.reason for r in report.rejections] == [True] * (reason is not None)


def test_an_in_place_add_is_left_to_inductor_which_writes_in_place(interpreted):
    def fn(x, y):
        x.add_(y.t())
        return x

    x, y = values((8, 6)), values((6, 8))
    expected = fn(x.clone(), y)
    got = interpreted(fn, options={"fuse.gate": "auto"})(x, y)
    assert got is x and torch.equal(x, expected)
    assert "aten.copy_.default" in fusebackend.last_report().rejections[0].reason


def test_what_is_behind_a_matmul_is_no_neighbour(interpreted):
    """The residual of the next layer is pointwise too, but it needs the matmul's result: it can't be fused with the first sum."""
    linear = nn.Linear(40, 40)

    def fn(x, y):
        h = x.transpose(0, 1) + y
        return h + linear(h).relu()

    interpreted(fn, options={"fuse.patterns": "transpose_add", "fuse.gate": "auto"})(values((40, 50)), values((50, 40)))
    first, second = (r.reason for r in fusebackend.last_report().rejections)
    assert "2000 elements" in first and "neighbour aten.relu.default" in second


SITES = {
    "alone": lambda x, y, order: x.permute(order) + y,
    "second operand": lambda x, y, order: y - x.permute(order),
    "after a product": lambda x, y, order: (x * x).permute(order) + y,
    "before a product": lambda x, y, order: (s := x.permute(order) + y) * s,
    "before a comparison": lambda x, y, order: x.permute(order) + y == y,
}


@pytest.mark.parametrize("seed", range(6))
def test_with_the_gate_off_what_does_not_pay_is_applied(interpreted, library, seed):
    """Random sums, alone or beside a neighbour that Inductor fuses, of which the default leaves all these to Inductor."""
    draw, refused = random.Random(seed), 0
    while refused < 4:
        shape = [draw.choice([2, 3, 5, 8, 17, 33, 64]) for _ in range(draw.randint(2, 4))]
        order, dtype = draw.sample(range(len(shape)), len(shape)), draw.choice(FLOATS + INTEGERS)
        x, y = values(shape, dtype), values([shape[d] for d in order], dtype)
        site = SITES[draw.choice(list(SITES))]

        def report(gate):
            torch._dynamo.reset()
            options = {"fuse.patterns": "transpose_add", "fuse.gate": gate}
            result = interpreted(lambda x, y: site(x, y, order), options=options)(x, y)
            assert_same_bits(result, site(x, y, order))
            return fusebackend.last_report()

        by_default = report("auto")
        if order[-1] != len(order) - 1:
            assert by_default.rejections and not by_default.substitutions
            assert len(report("off").substitutions) == 1
            refused += 1


@pytest.mark.parametrize(
    ("shape", "dtype", "dynamic", "reason"),
    [
        ((4100, 4096), torch.bfloat16, False, ""),  # the transposed operand's rows are of 4100
        ((4100, 4100), torch.bfloat16, False, "few bytes"),
        ((5100, 5100), torch.bfloat16, False, ""),
        ((4096, 4100), torch.bfloat16, False, "begin at sectors"),
        ((2900, 2900), torch.bfloat16, False, "few bytes"),
        ((4096, 2000), torch.bfloat16, False, "below 2048"),
        ((8, 4096, 4096), torch.bfloat16, True, ""),
        ((4096, 1024), torch.bfloat16, True, "few bytes"),
        ((2**20, 40), torch.bfloat16, True, "short rows"),
        ((700, 120, 240), torch.bfloat16, True, "short rows"),
        ((700, 120, 280), torch.bfloat16, True, "a side below 128"),
        ((700, 130, 280), torch.bfloat16, True, ""),
        ((4096, 4096), torch.float32, True, "large planes"),
        ((300, 100, 600), torch.float32, True, "a side below 128"),
        ((70, 100, 600), torch.float32, True, "few bytes"),
    ],
)
def test_where_a_gpu_gains(shape, dtype, dynamic, reason):
    found = _reason(shape, [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2], dtype, dynamic)
    assert reason in found if reason else found == ""


def test_dynamic_sums_of_a_short_side_gain_where_another_dim_lies_between():
    assert _reason((120, 700, 280), [2, 1, 0], torch.bfloat16, True) == ""
    assert _reason((120, 700, 280), [2, 1, 0], torch.float32, True) == ""


def _reason(shape, order, dtype, dynamic):
    """Why it is not measured that the kernel is faster for a sum of this shape and an operand whose dims lie in memory in this order."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    out = torch.empty(shape, dtype=dtype, device="meta")
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape)) if dynamic else None
    with mode:
        out = mode.from_tensor(out, source=ConstantSource("out"), symbolic_context=context) if dynamic else torch.empty_like(out)
        operand = torch.empty([out.shape[d] for d in order], dtype=dtype, device="meta").permute(
            [order.index(d) for d in range(len(shape))]
        )
        return unmeasured_reason((operand, out), out)
