"""What sums are said to make a device do, and what follows: what does not pay is left to Inductor with both times, and with the gate off
it is applied all the same."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from families.tile_tensors import FLOATS, INTEGERS, assert_same_bits, values
from families.traced_graphs import traced
from stand_in_calibrations import FASTER_US, SLOWER_US
from torch import nn
from torch._inductor import config
from torch._subclasses import FakeTensorMode

import fusebackend
from fusebackend.patterns.permute.estimate import ACROSS_MEMORY
from fusebackend.patterns.transpose_add import bench
from fusebackend.patterns.transpose_add.match import TransposeAdd
from fusebackend.rewriting.pattern import Generated, Match, Work

aten = torch.ops.aten
bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = pytest.mark.usefixtures("library")


def workloads(function, *inputs, **options):
    """Of each sum that is matched."""
    graph = traced(function, *inputs, **options)
    found = [TransposeAdd().match(n) for n in graph.nodes if n.target in TransposeAdd.anchors]
    return [TransposeAdd().estimate(match) for match in found if isinstance(match, Match)]


def workload(function, *inputs, **options):
    """Of the first sum that is matched."""
    return workloads(function, *inputs, **options)[0]


def total(x, y):
    return x.mT + y


# ---- works ----


@pytest.mark.usefixtures("kernels_for_every_device")
class TestWorks:
    @pytest.mark.parametrize(("batch", "rows", "columns", "dtype"), [(1, 1024, 2048, f32), (3, 1024, 2048, bf16), (2, 640, 96, f64)])
    def test_a_sum_on_a_gpu(self, batch, rows, columns, dtype):
        found = workload(total, (batch, rows, columns, dtype), (batch, columns, rows, dtype))
        (ours,), (theirs,) = found.ours, found.inductor
        amount = batch * rows * columns * dtype.itemsize
        assert ours.kind == "transpose_add" and ours.quantities["bytes"] == 3 * amount
        assert ours.quantities["moved"] >= 3 * amount and ours.quantities["blocks"] >= amount / (228 << 10)
        assert isinstance(theirs, Generated) and [n.target for n in theirs.nodes] == [aten.add.Tensor]
        assert theirs.family == ACROSS_MEMORY, "of sums, too, these are calibrated apart"
        assert found.neighbour is None

    @pytest.mark.parametrize(("dtype", "sixteen"), [(f32, 0), (bf16, 1), (f16, 1), (torch.int16, 0)])
    def test_a_sum_on_a_cpu(self, dtype, sixteen):
        found = workload(total, (3, 40, 50, dtype), (3, 50, 40, dtype), device="cpu")
        (ours,), (theirs,) = found.ours, found.inductor
        elements, size = 3 * 40 * 50, dtype.itemsize
        assert (ours.kind, theirs.kind) == ("transpose_add cpu", "sum cpu")
        assert ours.quantities == theirs.quantities == {"bytes": 3.0 * elements * size, "elements": elements, "runs": elements / 40}
        assert ours.shape == theirs.shape and ours.shape["16 bits"] == sixteen and ours.shape["log2 itemsize"] == math.log2(size)
        assert ours.shape["log2 result run"] == math.log2(50 * size) and ours.shape["log2 source run"] == math.log2(40 * size)
        assert ours.shape["broadcast"] == ours.shape["dynamic"] == 0

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_quantities_grow_with_the_sizes(self, device):
        small, large = (workload(total, (n, 512, 1024, f32), (n, 1024, 512, f32), device=device).ours[0] for n in (2, 6))
        assert large.quantities == {name: pytest.approx(3 * amount) for name, amount in small.quantities.items()}

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_equal_sums_are_equal_works(self, device):
        shapes = (4, 70, 90, f32), (4, 90, 70, f32)
        one = workload(total, *shapes, device=device).ours
        assert one == workload(lambda x, y: y.mT - x, shapes[1], shapes[0], device=device).ours
        assert one == workload(lambda x, y: torch.add(x.permute(0, 2, 1), y, alpha=3), *shapes, device=device).ours
        assert one != workload(total, *reversed(shapes), device=device).ours

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_sizes_known_at_run_time_count_as_those_traced(self, device):
        static, dynamic = (workload(total, (4, 70, 90, f32), (4, 90, 70, f32), device=device, dynamic=d).ours[0] for d in (False, True))
        assert static.quantities == dynamic.quantities
        assert device == "cuda" or (static.shape["dynamic"], dynamic.shape["dynamic"]) == (0, 1)

    NEIGHBOURS = {
        "reads it": (lambda x, y: torch.relu(x.t() + y), aten.relu.default),
        "is a sum over it": (lambda x, y: (x.t() + y).sum(0), aten.sum.dim_IntList),
        "computes one operand": (lambda x, y: x.exp().t() + y, aten.exp.default),
        "computes the other": (lambda x, y: x.t() + y.sin(), aten.sin.default),
    }

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    @pytest.mark.parametrize("name", NEIGHBOURS)
    def test_a_neighbour_that_inductor_would_fuse_is_a_kernel_of_its_own(self, name, device):
        function, target = self.NEIGHBOURS[name]
        found = workload(function, (80, 70, f32), (70, 80, f32), device=device)
        ours, neighbour = found.ours
        assert neighbour.kind == ("stream" if device == "cuda" else "stream cpu") and found.neighbour.target is target
        assert neighbour.quantities == {"bytes": 2 * 4 * 80 * 70}, "of a sum what it reads"
        assert len(found.inductor) == 1 and ours.kind.startswith("transpose_add")

    def test_two_neighbours_are_two_kernels(self):
        found = workload(lambda x, y: (x.exp().t() + y).relu(), (80, 70, f32), (70, 80, f32))
        assert [w.kind for w in found.ours] == ["transpose_add", "stream", "stream"]

    def test_what_is_behind_a_matmul_is_no_neighbour(self):
        """The residual of the next layer is pointwise too, but it needs the matmul's result: it can't be fused with the first sum."""

        def fn(x, y, w):
            h = x.transpose(0, 1) + y
            return h + (h @ w).relu()

        found = workload(fn, (40, 50, f32), (50, 40, f32), (40, 40, f32))
        assert [w.kind for w in found.ours] == ["transpose_add"] and found.neighbour is None

    @pytest.mark.parametrize("settings", [{}, {"max_autotune": True}, {"max_autotune_gemm": True}])
    def test_an_autotuned_product_takes_the_sum_into_its_template(self, settings):
        with config.patch(settings):
            found = workload(lambda a, b, y: (a @ b).t() + y, (60, 50, f32), (50, 70, f32), (70, 60, f32))
        assert [w.kind for w in found.ours] == ["transpose_add", *["stream"] * bool(settings)]
        assert (found.neighbour is not None) == bool(settings) and (not settings or found.neighbour.target is aten.mm.default)

    def test_a_product_that_others_read_too_does_not(self):
        with config.patch(max_autotune=True):
            found = workload(lambda a, b, y: ((c := a @ b).t() + y, c), (60, 50, f32), (50, 70, f32), (70, 60, f32))
        assert found.neighbour is None

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_every_case_of_the_bench_is_described(self, device, dynamic):
        table, drawn = bench.cases(), list(itertools.islice(bench.random_cases(random.Random(7), 1.0), 40))
        found = []
        for case in (*table, *drawn):
            with FakeTensorMode():
                inputs = case.inputs(torch.device("cpu"))
            found += workloads(case.fn, *inputs, device=device, dynamic=dynamic)
        assert len(found) >= len(table) + len(drawn) // 2  # of those that are drawn some keep the innermost dim
        for work in (w for both in found for w in (*both.ours, *both.inductor) if isinstance(w, Work)):
            assert all(map(math.isfinite, (*work.quantities.values(), *work.shape.values()))), work
            assert min(work.quantities.values()) >= 0 and work.kind.endswith(" cpu") == (device == "cpu"), work


# ---- what follows ----


def report(interpreted, function, *inputs, gate="auto", **kwargs):
    torch._dynamo.reset()
    result = interpreted(function, options={"fuse.patterns": "transpose_add", "fuse.gate": gate}, **kwargs)(*inputs)
    assert_same_bits(result, function(*inputs))
    return fusebackend.last_report()


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_faster_is_applied(interpreted, calibrated, dynamic):
    calibrated(FASTER_US)
    found = report(interpreted, total, values((30, 40)), values((40, 30)), dynamic=dynamic)
    assert len(found.substitutions) == 1 and not found.rejections


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_slower_stays_with_inductor_and_both_times_are_reported(interpreted, calibrated, dynamic):
    calibrated(SLOWER_US)
    found = report(interpreted, total, values((30, 40)), values((40, 30)), dynamic=dynamic)
    (refusal,) = found.rejections
    assert not found.substitutions and refusal.code == "estimated_slower"
    assert "100 us (90.5 to 111) by Inductor" in refusal.reason and "1e+03 us (905 to 1.11e+03) here" in refusal.reason


@pytest.mark.parametrize(
    ("fn", "shapes", "neighbour"),
    [
        (lambda x, y: x.t().double() + y.double(), [(8, 6), (6, 8)], "prims.convert_element_type.default"),
        (lambda x, y: torch.relu(x.t() + y), [(8, 6), (6, 8)], "aten.relu.default"),
        (lambda x, y: (x.t() + y).amax(0), [(8, 6), (6, 8)], "aten.amax.default"),
        (lambda x, y: x.abs().t() + y, [(8, 6), (6, 8)], "aten.abs.default"),
        (lambda x, y: x.t() + y.to(memory_format=torch.contiguous_format).neg(), [(8, 6), (6, 8)], "aten.neg.default"),
    ],
)
def test_a_neighbour_whose_fusion_decides_is_named(interpreted, calibrated, fn, shapes, neighbour):
    calibrated(SLOWER_US)
    inputs = [values(s) for s in shapes]
    found = report(interpreted, fn, *inputs)
    (refusal,) = found.rejections
    assert not found.substitutions and refusal.code == "fused_neighbour" and f"neighbour {neighbour}" in refusal.reason
    assert report(interpreted, fn, *inputs, gate="off").substitutions


def test_without_a_calibration_nothing_is_applied_unless_the_gate_is_off(interpreted, calibrated):
    calibrated(None)
    inputs = values((30, 40)), values((40, 30))
    found = report(interpreted, total, *inputs)
    assert not found.substitutions and [r.code for r in found.rejections] == ["unmeasured"]
    assert len(report(interpreted, total, *inputs, gate="off").substitutions) == 1


def test_an_in_place_add_is_left_to_inductor_which_writes_in_place(interpreted, calibrated):
    calibrated(SLOWER_US)

    def fn(x, y):
        x.add_(y.t())
        return x

    x, y = values((8, 6)), values((6, 8))
    expected = fn(x.clone(), y)
    got = interpreted(fn, options={"fuse.gate": "auto"})(x, y)
    assert got is x and torch.equal(x, expected)
    assert "aten.copy_.default" in fusebackend.last_report().rejections[0].reason


def test_of_two_sums_the_neighbour_of_each_is_reported(interpreted, calibrated):
    calibrated(SLOWER_US)
    linear = nn.Linear(40, 40)

    def fn(x, y):
        h = x.transpose(0, 1) + y
        return h + linear(h).relu()

    interpreted(fn, options={"fuse.patterns": "transpose_add", "fuse.gate": "auto"})(values((40, 50)), values((50, 40)))
    first, second = fusebackend.last_report().rejections
    assert first.code == "estimated_slower" and "neighbour" not in first.reason
    assert second.code == "fused_neighbour" and "neighbour aten.relu.default" in second.reason


SITES = {
    "alone": lambda x, y, order: x.permute(order) + y,
    "second operand": lambda x, y, order: y - x.permute(order),
    "after a product": lambda x, y, order: (x * x).permute(order) + y,
    "before a product": lambda x, y, order: (s := x.permute(order) + y) * s,
    "before a comparison": lambda x, y, order: x.permute(order) + y == y,
}


@pytest.mark.parametrize("seed", range(6))
def test_with_the_gate_off_what_does_not_pay_is_applied(interpreted, calibrated, seed):
    """Random sums, alone or beside a neighbour that Inductor fuses."""
    calibrated(SLOWER_US)
    draw, refused = random.Random(seed), 0
    while refused < 4:
        shape = [draw.choice([2, 3, 5, 8, 17, 33, 64]) for _ in range(draw.randint(2, 4))]
        order, dtype = draw.sample(range(len(shape)), len(shape)), draw.choice(FLOATS + INTEGERS)
        x, y = values(shape, dtype), values([shape[d] for d in order], dtype)
        site = SITES[draw.choice(list(SITES))]

        def fn(x, y):
            return site(x, y, order)

        by_default = report(interpreted, fn, x, y)
        if order[-1] != len(order) - 1:
            assert by_default.rejections and not by_default.substitutions
            assert {r.code for r in by_default.rejections} <= {"estimated_slower", "fused_neighbour"}
            assert len(report(interpreted, fn, x, y, gate="off").substitutions) == 1
            refused += 1
