"""Planes that wait in a ring in shared memory: which convolutions take it, and that these are right at the edges of its stages."""

from __future__ import annotations

import json

import pytest
import torch
from one_depthwise_convolution import TOLERANCE, Case
from test_depthwise_conv_routes import PLANES, check_routes, kernels

from fusebackend.patterns.depthwise_conv.ops import reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
BAND = PLANES[0].removeprefix("depthwise_")
# Several stages a block, the last of which has fewer images; one each; rows of several stages; the widest rows. All have more stages than
# the multiprocessors have blocks.
LARGE = (325, 132, 8, 16), (40, 1000, 9, 6), (3, 2400, 17, 28), (2, 800, 112, 56), (2, 600, 60, 128)
# One strip and several; channels whose planes begin at any two of 16 bytes; one image, and fewer rows than taps.
NARROW = (9, 34, 7, 8), (2, 24, 14, 14), (40, 5, 9, 6), (16, 3, 2, 10), (8, 3, 5, 2)
SMALL = (3, 16, 17, 28), (1, 130, 25, 60), (1, 1, 300, 4), (2, 3, 70, 112), *NARROW


def check_ring(case, forward):
    """Both gradients are one kernel. x's alone is a forward, if `forward` says that these are taken; the weight's alone is as elsewhere."""
    alone = "plane_ring" if forward else BAND
    assert kernels(case.forward) == [alone]
    for needed in ((True, True, True), (True, True, False), (True, False, True)):
        assert kernels(lambda needed=needed: case.backward(*needed)) == ["plane_ring", "reduce"]
    assert kernels(lambda: case.backward(True, False, False)) == [alone]
    assert kernels(lambda: case.backward(False, True, True)) == ["row_products", "reduce"]
    case.check()
    first = case.ours()
    assert all(map(torch.equal, first, case.ours()))
    for needed in ((True, True, False), (True, False, True)):
        for want, got, need in zip(first[1:], case.backward(*needed), needed):
            assert torch.equal(got, want) if need else got.numel() == 0
    x_alone = case.backward(True, False, False)[0]
    assert (x_alone - first[1]).abs().max() <= TOLERANCE[case.x.dtype] * first[1].abs().max()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [3, 5, 7])
def test_planes_wait_in_shared_memory(taps, dtype):
    for shape in LARGE:
        check_ring(Case(shape, taps, dtype, "cuda"), forward=True)
    for shape in SMALL:
        check_ring(Case(shape, taps, dtype, "cuda"), forward=False)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_small_blocks_of_large_tensors_are_dealt_out(taps, tmp_path):
    """Two stages each, and one where their number is odd, in several waves of blocks."""
    per_multiprocessor = 5 * 16 * torch.cuda.get_device_properties("cuda").multi_processor_count
    for batch, height, stages in ((33, 9, 3), (128, 8, 8)):
        case = Case((batch, -(-per_multiprocessor // (stages // 2)), height, 6), taps, BF16, "cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            case.forward()
            torch.cuda.synchronize()
        profiled.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        grids = [e["args"]["grid"] for e in events if "depthwise_plane_ring" in e.get("name", "") and "grid" in e.get("args", {})]
        assert grids == [[case.x.shape[1] * -(-stages // 2), 1, 1]]
        check_ring(case, forward=True)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_parts_of_tensors_wait_too(taps):
    wide, case = Case((41, 1016, 12, 10), taps, BF16, "cuda"), Case((40, 1000, 12, 10), taps, BF16, "cuda")
    for case.x, case.grad in ((wide.x[1:, 8:1008], wide.grad[:40, 16:]), (wide.x[:1, 8:1008].expand(40, -1, -1, -1), wide.grad[1:, :1000])):
        check_ring(case, forward=True)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_forward_with_any_padding_that_taps_reach(taps):
    half = taps // 2
    for padding in ((0, 0, 0, 0), (1, 0, 2, 0), (taps - 1, 0, 0, 0), (2, 2, 1, 1), (0, taps - 1, half, half), (half, 90, half, half)):
        case = Case((40, 1000, 12, 16), taps, BF16, "cuda", padding=padding)
        if case.grad.shape[3] % 2 == 0 and case.grad.shape[3] <= 16:
            assert kernels(case.forward) == ["plane_ring"], padding
        case.check()


def test_what_does_not_wait():
    """Rows of no whole words, or of more strips than one product has; memory that is not aligned, or ends amid 16 bytes; what follows."""
    for shape in ((3, 16, 17, 29), (5, 2, 120, 202), (17, 3, 2, 10)):
        check_routes(Case(shape, 3, BF16, "cuda"), PLANES)
    for offset in (1, 2, 4):
        check_routes(Case((40, 1000, 9, 6), 3, BF16, "cuda", offset=offset), PLANES)
    case = Case((40, 1000, 9, 6), 3, BF16, "cuda")
    arguments = (*case.numbers, None, None, None, None, None, 0.0, "relu")
    assert kernels(lambda: torch.ops.fusebackend.depthwise_conv(case.x, case.weight, case.bias, *arguments)) == [BAND]
    got = torch.ops.fusebackend.depthwise_conv(case.x, case.weight, case.bias, *arguments)
    want = reference(case.x.double(), case.weight.double(), case.bias.double(), *case.numbers).relu()
    assert (got.double() - want).norm() < TOLERANCE[BF16] * want.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [3, 5, 7])
def test_what_is_not_finite_reaches_what_depends_on_it(taps, dtype):
    case = Case((40, 1000, 9, 6), taps, dtype, "cuda")
    case.plant_what_is_not_finite()
    assert kernels(case.forward) == ["plane_ring"] and kernels(case.backward) == ["plane_ring", "reduce"]
    case.check_what_is_not_finite()
