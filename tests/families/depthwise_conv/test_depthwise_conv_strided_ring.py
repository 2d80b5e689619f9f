"""Strided planes that wait in a ring in shared memory: which convolutions take it, and that these are right at the edges of its stages."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from one_depthwise_convolution import TOLERANCE, Case
from test_depthwise_conv_routes import kernels

from fusebackend.patterns.depthwise_conv.ops import reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
# Rows of whole words and of others; several stages a block, the last of which has fewer images; rows of several stages.
SHAPES = (325, 136, 8, 16), (40, 1000, 9, 6), (3, 2400, 17, 29), (2, 264, 112, 112), (8, 136, 15, 15), (2, 136, 300, 64)
# The widest rows; fewer rows than taps.
EXTREME = (1, 136, 24, 500), (16, 264, 2, 4)


def check_ring(case):
    """The forward, and both gradients as one kernel; those alone are as elsewhere."""
    assert kernels(case.forward) == ["strided_ring"]
    for needed in ((True, True, True), (True, True, False), (True, False, True)):
        assert kernels(lambda needed=needed: case.backward(*needed)) == ["strided_ring", "reduce"]
    assert kernels(lambda: case.backward(True, False, False)) == ["toeplitz"]
    assert kernels(lambda: case.backward(False, True, True)) == ["outer_products", "reduce"]
    case.check()
    first = case.ours()
    assert all(map(torch.equal, first, case.ours()))
    for needed in ((True, True, False), (True, False, True)):
        for want, got, need in zip(first[1:], case.backward(*needed), needed):
            assert torch.equal(got, want) if need else got.numel() == 0


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [3, 5])
def test_strided_planes_wait_in_shared_memory(taps, dtype):
    for shape in SHAPES + EXTREME:
        check_ring(Case(shape, taps, dtype, "cuda", stride=2))


@pytest.mark.parametrize("width", [12, 13, 14, 15])
@pytest.mark.parametrize("taps", [3, 5])
def test_any_padding_that_taps_reach(taps, width):
    for top, left, beyond in itertools.product(range(taps), range(taps), (0, 1, 7)):
        case = Case((8, 136, 11, width), taps, BF16, "cuda", stride=2, padding=(top, beyond, left, beyond))
        assert kernels(case.forward) == ["strided_ring"] and kernels(case.backward) == ["strided_ring", "reduce"]
        case.check()


@pytest.mark.parametrize("taps", [3, 5])
def test_parts_of_tensors_wait_too(taps):
    wide, case = Case((41, 1016, 12, 10), taps, BF16, "cuda", stride=2), Case((40, 1000, 12, 10), taps, BF16, "cuda", stride=2)
    for case.x, case.grad in ((wide.x[1:, 8:1008], wide.grad[:40, 16:]), (wide.x[:1, 8:1008].expand(40, -1, -1, -1), wide.grad[1:, :1000])):
        check_ring(case)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_what_follows(activation):
    for shape, taps in (((40, 1000, 9, 6), 3), ((8, 136, 15, 15), 5)):
        case = Case(shape, taps, BF16, "cuda", stride=2)
        vectors = [torch.rand(shape[1], device="cuda") + 0.5 for _ in range(4)]
        operands, behind = (case.x, case.weight, case.bias), (*vectors, 1e-3, activation)
        convolve = functools.partial(torch.ops.fusebackend.depthwise_conv, *operands, *case.numbers, None, *behind)
        assert kernels(convolve) == ["strided_ring"]
        want = reference(*(t.double() for t in operands), *case.numbers, *(v.double() for v in vectors), 1e-3, activation)
        assert (convolve().double() - want).norm() < TOLERANCE[BF16] * want.norm()


def test_what_does_not_wait():
    """Fewer stages than multiprocessors; other strides, taps, dilations, orders; rows wider than a block; memory not of whole vectors."""
    for shape, more in (
        ((2, 16, 20, 28), {}),
        ((8, 136, 20, 28), dict(stride=(2, 1))),
        ((8, 136, 20, 28), dict(dilation=2)),
        ((1, 136, 6, 520), {}),
        ((17, 133, 9, 15), {}),
        ((8, 136, 20, 28), dict(offset=2)),
        ((8, 136, 20, 28), dict(taps=7)),
        ((8, 136, 20, 28), dict(dtype=torch.float32)),
        ((8, 136, 20, 28), dict(orders=(True, True))),
    ):
        case = Case(shape, **{"taps": 3, "dtype": BF16, "device": "cuda", "stride": 2, **more})
        assert "strided_ring" not in kernels(case.forward) + kernels(case.backward)
        case.check()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("width", [6, 7, 8])
def test_what_is_not_finite_reaches_what_depends_on_it(taps, dtype, width):
    case = Case((40, 1000, 9, width), taps, dtype, "cuda", stride=2)
    case.plant_what_is_not_finite()
    assert kernels(case.forward) == ["strided_ring"] and kernels(case.backward) == ["strided_ring", "reduce"]
    case.check_what_is_not_finite()


def test_errors_are_no_larger_than_eagers():
    for taps in (3, 5):
        case = Case((16, 264, 28, 28), taps, BF16, "cuda", stride=2)
        exact, eager = case.torchs(), case.torchs(BF16)
        for got, theirs, want in zip(case.ours(), eager, exact):
            assert (got.double() - want).norm() <= 1.05 * (theirs.double() - want).norm()


def test_cuda_graphs_and_side_streams():
    case = Case((40, 1000, 9, 6), 3, BF16, "cuda", stride=2)
    want = case.ours()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert all(map(torch.equal, case.ours(), want))
    stream.synchronize()
    with torch.cuda.graph(graph):
        got = case.ours()
    for t in got:
        t.zero_()
    graph.replay()
    assert all(map(torch.equal, got, want))
