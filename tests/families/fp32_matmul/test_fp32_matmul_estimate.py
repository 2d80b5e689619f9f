"""What both ways make a GPU do: quantities of a few products, and that whatever the benchmark draws is described. Without a GPU."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from traced_products import aten, calls, estimated, h200, ops, rewritten, traced

from fusebackend.patterns.fp32_matmul import bench, estimate, match
from fusebackend.patterns.fp32_matmul.products import TARGETS
from fusebackend.rewriting.device_facts import IMAGINED
from fusebackend.rewriting.pattern import Match, Workload

__all__ = ["h200"]
pytestmark = pytest.mark.usefixtures("h200")

PATTERN = match.Fp32Matmul()
#: Multiplications and additions of a tile of the wgmma kernel, of 128 x 192, at one element of k, in six products of planes.
TILE_FLOPS = 2 * 128 * 192 * 6


def described(graph):
    """The works of all products of a graph, ours and theirs."""
    nodes = [n for n in graph.nodes if n.target in TARGETS]
    found = [PATTERN.match(n) for n in nodes]
    return [PATTERN.estimate(m) for m in found if isinstance(m, Match)]


@pytest.mark.parametrize("shape", [(512, 512, 512), (256, 256, 50176), (200704, 128, 512), (1, 8192, 8192)])
def test_every_legal_product_is_replaced_with_the_gate_off(shape):
    m, n, k = shape
    graph, result = rewritten(lambda a, b: a @ b, (m, k), (k, n))
    assert calls(graph, ops.matmul.default) and not result.rejections


@pytest.mark.parametrize("k, taken", [(256, False), (512, True)])
def test_where_the_error_would_be_larger_than_cublass_it_stays(k, taken):
    graph, result = rewritten(lambda a, b: a @ b, (8192, k), (k, 8192))
    assert bool(calls(graph, ops.matmul.default)) is taken
    assert taken or "the error may be" in result.rejections[0].reason


def test_the_quantities_of_a_product():
    m, n, k = 1694, 320, 1664
    both = estimated(m, k, n)
    (ours,), (theirs,) = both.ours, both.inductor
    assert (ours.kind, theirs.kind) == ("fp32_matmul", "cublas fp32")
    planes = 6 * k * (m + n)
    assert ours.quantities == {
        "flops": TILE_FLOPS * 32 * 13,  # 28 tiles, each in 4 parts of 13 blocks of 32
        "exact flops": 0,
        "ends": 1,
        "unpaired ends": 0,
        "parts": 4,
        "staged bytes": 28 * k * (128 + 192) * 6,
        "bytes": planes + 4 * m * n,
        "split bytes": 4 * k * (m + n) + planes,
        "gathered bytes": 0,
    }
    assert theirs.quantities == {
        "flops": 2 * m * n * k,
        "bytes": 4 * (m * k + k * n + m * n),
        "depth in waves of 64": k * math.ceil(27 * 5 / 132),
        "depth in waves of 128": k,
    }


def test_shallow_sums_and_results_that_are_not_stored_in_pairs_are_told_apart():
    (ours,) = estimated(16896, 512, 191).ours
    assert ours.quantities["flops"] == 0 < ours.quantities["exact flops"]
    assert ours.quantities["unpaired ends"] == ours.quantities["ends"] > 0


def test_rows_that_are_not_aligned_are_gathered():
    (ours,) = estimated(1024, 1025, 1024).ours  # rows of a are 4100 bytes
    padded = 6 * 1024 * 1088  # of planes, whose rows are multiples of 64 elements
    assert ours.quantities["gathered bytes"] == 4 * 1024 * 1025 + padded
    assert ours.quantities["split bytes"] == 4 * 1024 * 1025 + 6 * 1025 * 1024


def test_planes_that_other_products_use_are_split_once():
    def backward(grad, weight, x):
        return aten.mm(grad, weight), aten.mm(aten.permute(grad, [1, 0]), x)

    graph = traced(backward, (8192, 2304), (2304, 768), (8192, 768))
    dx, dw = described(graph)
    alone = estimated(8192, 2304, 768).ours[0].quantities["split bytes"]
    of_grad = 10 * 8192 * 2304
    assert dx.ours[0].quantities["split bytes"] == alone - of_grad / 2
    assert dw.ours[0].quantities["split bytes"] == 10 * 8192 * (2304 / 2 + 768)


def test_a_factor_that_inductor_would_not_fuse_is_a_kernel():
    alone = described(traced(lambda a, b: 0.125 * aten.mm(a, b), (2048, 2048), (2048, 2048)))[0]
    fused = described(traced(lambda a, b: torch.relu(0.125 * aten.mm(a, b)), (2048, 2048), (2048, 2048)))[0]
    assert [w.kind for w in alone.inductor] == ["cublas fp32", "stream"] and alone.inductor[1].quantities == {"bytes": 2 * 4 * 2048**2}
    assert [w.kind for w in fused.inductor] == ["cublas fp32"]


@pytest.mark.parametrize(
    "capability, kernel", [((7, 5), None), ((8, 0), "mma"), ((8, 6), None), ((8, 9), None), ((9, 0), "wgmma"), ((12, 0), None)]
)
def test_other_gpus_are_described_by_the_kernel_that_they_run(monkeypatch, capability, kernel):
    monkeypatch.setattr(estimate, "device_facts", lambda device: dataclasses.replace(IMAGINED, capability=capability, multiprocessors=100))
    (ours,) = estimated(4096, 4096, 4096).ours
    assert [name for name in ("wgmma", "mma") if ours.shape[name]] == [kernel] * (kernel is not None)
    tiles = {"wgmma": None, "mma": 32 * 32, None: 32 * 16}[kernel]
    if tiles:
        flops = {"mma": 2 * 128 * 128 * 6, None: 2 * 128 * 256}[kernel]
        assert ours.quantities["flops"] == math.ceil(tiles / 100) * flops * 4096
    assert (ours.quantities["split bytes"] > 0) == (kernel is not None), "only tensor cores need planes"


def test_what_is_empty_or_of_unknown_size_is_no_workload():
    assert estimated(0, 1024, 1024).pays is False


def is_described(both, dynamic):
    assert isinstance(both, Workload), both
    for work in (*both.ours, *both.inductor):
        assert all(math.isfinite(v) and v >= 0 for v in work.quantities.values()), work
        assert all(math.isfinite(v) for v in work.shape.values()), work
        assert work.shape["dynamic"] == dynamic


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_the_benchmark_times_is_described(dynamic):
    products = [(m, n, k, orders, bias) for _, m, n, k, orders, bias in bench.model_products() if k >= match.LEAST_K]
    for m, n, k, orders, bias in [*products, (4096, 4096, 4096, "cc", False)]:
        shapes = [(m, k) if orders[0] == "r" else (k, m), (k, n) if orders[1] == "r" else (n, k), *([(n,)] * bias)]

        def fn(a, b, *d, orders=orders):
            a, b = a if orders[0] == "r" else a.mT, b if orders[1] == "r" else b.mT
            return torch.addmm(d[0], a, b) if d else torch.mm(a, b)

        (both,) = described(traced(fn, *shapes, dynamic=dynamic))
        is_described(both, dynamic)


def test_random_shapes_are_described():
    for case in itertools.islice(bench.random_cases(random.Random(0), 1.0), 40):
        operands = case.inputs(torch.device("meta"))
        if operands[0].shape[-1] >= match.LEAST_K:
            (both,) = described(traced(case.fn, *(x.shape for x in operands)))
            is_described(both, False)
