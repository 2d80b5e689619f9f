"""What copies are said to make a device do, and what follows: what does not pay is left to Inductor with both times, and with the gate off
it is applied all the same."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from families.tile_tensors import MOVABLE, assert_same_bits, values
from families.traced_graphs import traced
from stand_in_calibrations import FASTER_US, SLOWER_US
from torch._subclasses import FakeTensorMode

import fusebackend
from fusebackend.patterns.permute import bench
from fusebackend.patterns.permute.estimate import ACROSS_MEMORY
from fusebackend.patterns.permute.match import Permute
from fusebackend.rewriting.pattern import Estimate, Generated, Match, Work

aten = torch.ops.aten
f16, f32, f64, i8 = torch.float16, torch.float32, torch.float64, torch.int8
pytestmark = pytest.mark.usefixtures("library")


def workloads(function, *inputs, **options):
    """All that the pattern says of the only match."""
    graph = traced(function, *inputs, **options)
    found = [m for n in graph.nodes if n.target in Permute.anchors if (m := Permute().match(n)) is not None]
    (match,) = found
    assert isinstance(match, Match), match
    return Permute().estimate(match)


def workload(function, *inputs, **options):
    (found,) = workloads(function, *inputs, **options)
    return found


def transposed(x):
    return x.transpose(-1, -2).contiguous()


# ---- works ----


@pytest.mark.usefixtures("kernels_for_every_device")
class TestWorks:
    @pytest.mark.parametrize(("batch", "rows", "columns", "dtype"), [(1, 1024, 2048, f32), (3, 1024, 2048, f16), (2, 640, 96, f64)])
    def test_a_copy_on_a_gpu(self, batch, rows, columns, dtype):
        found = workload(transposed, (batch, rows, columns, dtype))
        (ours,), (theirs,) = found.ours, found.inductor
        amount = batch * rows * columns * dtype.itemsize
        assert ours.kind == "permute" and ours.quantities["bytes"] == 2 * amount
        assert ours.quantities["moved"] >= 2 * amount and ours.quantities["blocks"] >= amount / (228 << 10)
        assert isinstance(theirs, Generated) and [n.target for n in theirs.nodes] == [aten.clone.default]
        assert theirs.family == ACROSS_MEMORY and found.neighbour is None and found.match is None

    def test_a_copy_on_a_cpu(self):
        found = workload(transposed, (3, 40, 50, f32), device="cpu")
        (ours,), (theirs,) = found.ours, found.inductor
        elements = 3 * 40 * 50
        assert (ours.kind, theirs.kind) == ("permute cpu", "copy cpu")
        assert ours.quantities == theirs.quantities == {"bytes": 8.0 * elements, "elements": elements, "runs": elements / 40}
        assert ours.shape["dynamic"] == 0 and ours.shape["log2 itemsize"] == 2 and ours.shape["merged dims"] == 3
        assert ours.shape["log2 step"] == math.log2(50 * 4) and ours.shape["log2 inside"] == math.log2(50)

    def test_runs_are_of_whole_dims(self):
        ours = workload(lambda x: x.transpose(0, 1).contiguous(), (30, 40, 16, f32), device="cpu").ours[0]
        assert ours.quantities["runs"] == 30 * 40 and ours.shape["keeps innermost"] == 1
        assert ours.shape["log2 result run"] == ours.shape["log2 source run"] == 6 and ours.shape["result alignment"] == 6

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_quantities_grow_with_the_sizes(self, device):
        small, large = (workload(transposed, (n, 512, 1024, f32), device=device).ours[0] for n in (2, 6))
        assert large.quantities == {name: pytest.approx(3 * amount) for name, amount in small.quantities.items()}

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_equal_copies_are_equal_works(self, device):
        one = workload(transposed, (4, 70, 90, f32), device=device).ours
        assert one == workload(lambda x: x.permute(0, 2, 1).contiguous(), (4, 70, 90, torch.int32), device=device).ours
        assert one == workload(lambda x: x.mT.reshape(4, -1) * 1, (4, 70, 90, f32), device=device).ours[:1]
        assert one != workload(transposed, (4, 90, 70, f32), device=device).ours

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_sizes_known_at_run_time_count_as_those_traced(self, device):
        static, dynamic = (workload(transposed, (4, 70, 90, f32), device=device, dynamic=d).ours[0] for d in (False, True))
        assert static.quantities == dynamic.quantities
        assert device == "cuda" or (static.shape["dynamic"], dynamic.shape["dynamic"]) == (0, 1)

    NEIGHBOURS = {
        "reads it": (lambda x: x.t().contiguous().relu(), aten.relu.default),
        "is a sum over it": (lambda x: x.t().contiguous().sum(0), aten.sum.dim_IntList),
        "has two results": (lambda x: torch.var_mean(x.t().contiguous(), 0), aten.var_mean.correction),
        "computes it": (lambda x: x.exp().t().contiguous(), aten.exp.default),
    }

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    @pytest.mark.parametrize("name", NEIGHBOURS)
    def test_a_neighbour_that_inductor_would_fuse_is_a_kernel_of_its_own(self, name, device):
        function, target = self.NEIGHBOURS[name]
        found = workload(function, (80, 70, f32), device=device)
        copy, neighbour = found.ours
        assert neighbour.kind == ("stream" if device == "cuda" else "stream cpu") and found.neighbour.target is target
        assert neighbour.quantities == {"bytes": 2 * 4 * 80 * 70}, "of a sum what it reads"
        assert len(found.inductor) == 1 and copy.kind.startswith("permute")

    def test_a_neighbour_that_reads_a_part_of_a_table_does_not_read_all_of_it(self):
        found = workload(lambda table, i: table[i].t().contiguous(), (100_000, 70, f32), (80, torch.int64))
        assert found.neighbour.target is aten.index.Tensor and found.ours[1].quantities == {"bytes": 2 * 4 * 80 * 70}

    @pytest.mark.parametrize(("op", "batch"), [(torch.bmm, 500), (lambda x, y: torch.baddbmm(x[0, 0], x, y), 300)])
    def test_an_operand_of_a_batched_product_is_copied_by_pytorch(self, op, batch):
        def function(x, y):
            return op(x.permute(2, 0, 1), y)

        found = workload(function, (20, 30, batch, f32), (batch, 30, 30, f32))
        (ours,), (theirs,) = found.ours, found.inductor
        assert (ours.kind, theirs.kind) == ("permute", "strided copy") and found.neighbour is None
        assert theirs.quantities == {"bytes": 2 * 4 * 600 * batch, "elements": 600 * batch, "runs": 600}
        assert workload(function, (20, 30, batch, f32), (batch, 30, 30, f32), device="cpu").inductor[0].kind == "copy cpu"

    def test_of_two_operands_each_is_described_by_itself_too(self):
        both, first, second = workloads(
            lambda x, y: torch.bmm(x.permute(2, 0, 1), y.permute(2, 0, 1)), (20, 30, 500, f32), (30, 40, 500, f32)
        )
        assert both.match is None and both.ours == first.ours + second.ours and both.inductor == first.inductor + second.inductor
        assert [[c.argument for c in w.match.site] for w in (first, second)] == [[0], [1]]

    @pytest.mark.parametrize("dtype", [f16, f32])
    def test_the_input_of_a_convolution_is_brought_into_order_by_a_kernel_of_inductors(self, dtype):
        def function(x, w, b):
            return torch.ops.aten.convolution.default(x.transpose(1, 2), w, b, [1], [0], [1], False, [0], 1)

        found = workload(function, (4, 100, 64, dtype), (64, 64, 3, dtype), (64, dtype))
        (theirs,) = found.inductor
        assert isinstance(theirs, Generated) and theirs.nodes[0].target is aten.clone.default
        assert theirs.nodes[0].meta["val"].shape == (4, 64, 100) and theirs.nodes[0].meta["val"].is_contiguous()
        assert [w.kind for w in found.ours] == ["permute"]
        fused = workload(lambda x, w, b: function(x.sin(), w, b), (4, 100, 64, dtype), (64, 64, 3, dtype), (64, dtype))
        assert [w.kind for w in fused.ours] == ["permute", "stream"] and fused.neighbour.target is aten.sin.default

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_an_empty_copy_gains_nothing(self, device):
        def function(x, w, b):
            return torch.ops.aten.convolution.default(x.transpose(1, 2), w, b, [1], [2], [1], False, [0], 1)

        graph = traced(function, (0, 4, 6, f32), (5, 6, 3, f32), (5, f32), device=device)
        (node,) = (n for n in graph.nodes if n.target is aten.convolution.default)
        match = Permute().match(node)
        assert isinstance(match, Match), match
        assert Permute().estimate(match) == Estimate(False, "an empty tensor: nothing to gain")

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_every_case_of_the_bench_is_described(self, device, dynamic):
        cases = [*bench.cases(), *itertools.islice(bench.random_cases(random.Random(7), 1.0), 40)]
        for case in cases:
            with FakeTensorMode():
                inputs = case.inputs(torch.device("cpu"))
            for found in workloads(case.fn, *inputs, device=device, dynamic=dynamic):
                for work in (w for w in (*found.ours, *found.inductor) if isinstance(w, Work)):
                    numbers = [*work.quantities.values(), *work.shape.values()]
                    assert all(map(math.isfinite, numbers)) and min(work.quantities.values()) >= 0, (case.name, work)
                    assert work.kind.endswith(" cpu") == (device == "cpu")


# ---- what follows ----


def report(interpreted, function, *inputs, gate="auto", **kwargs):
    torch._dynamo.reset()
    result = interpreted(function, options={"fuse.patterns": "permute", "fuse.gate": gate}, **kwargs)(*inputs)
    assert_same_bits(result, function(*inputs))
    return fusebackend.last_report()


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_faster_is_applied(interpreted, calibrated, dynamic):
    calibrated(FASTER_US)
    found = report(interpreted, transposed, values((30, 40)), dynamic=dynamic)
    assert len(found.substitutions) == 1 and not found.rejections


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_slower_stays_with_inductor_and_both_times_are_reported(interpreted, calibrated, dynamic):
    calibrated(SLOWER_US)
    found = report(interpreted, transposed, values((30, 40)), dynamic=dynamic)
    (refusal,) = found.rejections
    assert not found.substitutions and refusal.code == "estimated_slower"
    assert "100 us (90.5 to 111) by Inductor" in refusal.reason and "1e+03 us (905 to 1.11e+03) here" in refusal.reason


@pytest.mark.parametrize(
    ("fn", "neighbour"),
    [
        (lambda x: x.t().contiguous().relu(), "aten.relu.default"),
        (lambda x: x.abs().t().contiguous(), "aten.abs.default"),
        (lambda x: x.t().contiguous().half(), "prims.convert_element_type.default"),
        (lambda x: x.t().contiguous() * 2, "aten.mul.Tensor"),
        (lambda x: torch.cat([x.t().contiguous(), x.t().contiguous()]), "aten.cat.default"),
        (lambda x: x.t().contiguous().amax(0), "aten.amax.default"),
    ],
)
def test_a_neighbour_whose_fusion_decides_is_named(interpreted, calibrated, fn, neighbour):
    calibrated(SLOWER_US)
    found = report(interpreted, fn, values((80, 70)))
    assert not found.substitutions and found.rejections
    for refusal in found.rejections:
        assert refusal.code == "fused_neighbour" and f"neighbour {neighbour}" in refusal.reason
    assert report(interpreted, fn, values((80, 70)), gate="off").substitutions


def test_without_a_calibration_nothing_is_applied_unless_the_gate_is_off(interpreted, calibrated):
    calibrated(None)
    found = report(interpreted, transposed, values((30, 40)))
    assert not found.substitutions and [r.code for r in found.rejections] == ["unmeasured"]
    assert len(report(interpreted, transposed, values((30, 40)), gate="off").substitutions) == 1


def test_of_two_operands_only_the_one_whose_copy_pays_is_copied(interpreted, calibrated, monkeypatch):
    calibrated(FASTER_US)
    x, y = values((2, 2, 10_000), i8).float(), values((2, 1, 10_000), i8).float()
    described = Permute.estimate

    def estimate(self, match):
        """As if the second operand's copy took much longer than by Inductor."""
        made = described(self, match)
        slow = [w for w in made if len(made) > 1 and w is not made[1]]
        return [type(w)((*w.ours, *[Work("stream cpu", {})] * 9), w.inductor, w.neighbour, w.match) if w in slow else w for w in made]

    monkeypatch.setattr(Permute, "estimate", estimate)

    def fn(x, y):
        return torch.bmm(x.permute(2, 0, 1), y.permute(2, 0, 1))

    for gate, copies in (("auto", 1), ("off", 2)):
        (substitution,) = report(interpreted, fn, x, y, gate=gate).substitutions
        assert len([node for node in substitution.replacement if "permute_copy" in node]) == copies


SITES = {
    "alone": lambda x, permutation: x.permute(permutation).contiguous(),
    "after a sum": lambda x, permutation: (x + x).permute(permutation).contiguous(),
    "before a sum": lambda x, permutation: (copy := x.permute(permutation).contiguous()) + copy,
    "before a comparison": lambda x, permutation: x.permute(permutation).contiguous() == x.permute(permutation),
}


@pytest.mark.parametrize("seed", range(6))
def test_with_the_gate_off_what_does_not_pay_is_applied(interpreted, calibrated, seed):
    """Random copies, alone or beside a neighbour that Inductor fuses."""
    calibrated(SLOWER_US)
    draw, refused = random.Random(seed), 0
    while refused < 4:
        shape = [draw.choice([2, 3, 5, 8, 17, 33, 64]) for _ in range(draw.randint(2, 4))]
        x, permutation = values(shape, draw.choice(MOVABLE)), draw.sample(range(len(shape)), len(shape))
        site = SITES[draw.choice(list(SITES))]

        def fn(x):
            return site(x, permutation)

        by_default = report(interpreted, fn, x)
        assert not by_default.substitutions
        if by_default.rejections:
            assert {r.code for r in by_default.rejections} <= {"estimated_slower", "fused_neighbour"}
            assert len(report(interpreted, fn, x, gate="off").substitutions) == 1
            refused += 1
