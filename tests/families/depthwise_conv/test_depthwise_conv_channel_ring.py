"""Pixels that tensor copies bring and take: which convolutions this takes, and that they are right at the edges of segments and tiles."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from one_depthwise_convolution import TOLERANCE, Case
from test_depthwise_conv_routes import CHANNELS, check_routes, kernels

from fusebackend.patterns.causal_conv1d.channel_reference import ACTIVATIONS
from fusebackend.patterns.depthwise_conv.ops import reference
from fusebackend.patterns.depthwise_conv.work import kernel_work

ops = torch.ops.fusebackend
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RING = ("depthwise_channel_ring", "depthwise_channel_ring", "depthwise_channel_products")
needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def ring_rows(shape, taps=7, direction="forward", dtype=BF16, *, stride=1, dilation=1, outputs=1, orders=(True,) * 3):
    """The rows that a thread block has on an H100 or H200; 0 where `channel_band`, or another, takes the convolution."""
    n, c, h, w = shape
    result = [(side + taps // 2 * dilation * 2 - (taps - 1) * dilation - 1) // stride + 1 for side in (h, w)]
    sizes = [n, c, c * outputs, h, w, *result]
    pad = taps // 2 * dilation
    return kernel_work(direction, sizes, (taps,) * 2, (stride,) * 2, (pad,) * 2, (dilation,) * 2, orders, dtype, 132)["ring_rows"]


@pytest.mark.parametrize("direction", ["forward", "input"])
def test_blocks_have_rows_that_keep_multiprocessors_equally_busy(direction):
    for dtype in (BF16, FP16):
        assert ring_rows((128, 96, 56, 56), 7, direction, dtype) == 28  # 768 blocks, for 3 times 264
        assert ring_rows((128, 384, 14, 14), 7, direction, dtype) == 14
        assert ring_rows((128, 768, 7, 7), 7, direction, dtype) == 8  # an even number
    for batch, height, width in ((64, 57, 57), (128, 31, 28), (200, 100, 112), (40, 33, 131)):
        for taps in (5, 7):
            rows = ring_rows((batch, 128, height, width), taps, direction)
            assert 0 < rows <= height + 1 and rows % 2 == 0


def test_what_is_left_to_others():
    large = (128, 96, 56, 56)
    assert ring_rows(large, 5) and ring_rows(large, 7)
    for more in (
        dict(taps=3),
        dict(dtype=FP32),
        dict(stride=2),
        dict(dilation=2),
        dict(outputs=2),
        dict(orders=(False,) * 3),
        dict(orders=(True, False, True)),
    ):
        assert ring_rows(large, **more) == 0, more
    assert ring_rows((128, 100, 56, 56)) == 0  # 16 bytes are eight channels
    assert ring_rows((2, 16, 56, 56)) == 0  # fewer blocks than multiprocessors
    # Segments are of neighbouring images.
    assert ring_rows((1, 2048, 56, 56)) == 0 and ring_rows((4, 2048, 14, 14)) == 0 and ring_rows((5, 2048, 14, 14)) > 0


# Two to sixteen segments, the last of which are of no image; strips of whole and of broken places; one block of columns; tiles of columns
# and rows; half a tile of channels.
SHAPES = (
    *((2, 1200, 25, 56), (60, 72, 56, 50), (2, 1000, 9, 61), (2, 616, 30, 112), (2, 520, 40, 131)),
    *((3, 1040, 17, 28), (3, 1400, 10, 30), (4, 1096, 3, 20), (9, 1000, 14, 13), (33, 776, 7, 7), (17, 1064, 9, 5), (17, 2120, 4, 1)),
)


@pytest.mark.cuda
@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [5, 7])
def test_pixels_come_and_go_by_tensor_copies(taps, dtype):
    for shape in SHAPES:
        check_routes(Case(shape, taps, dtype, "cuda", orders=(True, True)), RING)


@pytest.mark.cuda
@needs_sm90
@pytest.mark.parametrize("taps", [5, 7])
def test_padding_of_any_kind(taps):
    for shape in ((3, 1040, 19, 24), (17, 1064, 20, 8)):
        for padding in ((0, 0, 0, 0), (1, 0, 2, 1), (6, 3, 3, 3), (-1, 2, 3, 5), (2, 2, -3, 4), (9, 9, 9, 9)):
            case = Case(shape, taps, BF16, "cuda", padding=padding, orders=(True, True))
            assert kernels(case.forward) == ["channel_ring"], (shape, padding)
            case.check()


@pytest.mark.cuda
@needs_sm90
def test_parts_of_tensors():
    shape, order = (3, 1040, 17, 28), dict(orders=(True, True))
    case, wide = Case(shape, 7, BF16, "cuda", **order), Case((4, 1056, 20, 31), 7, BF16, "cuda", **order)
    for case.x in (wide.x[1:, 8:1048, 2:19, 3:], wide.x[:3, 16:, :17, :28], wide.x[::1, :1040, :17, 1:29][:3]):
        check_routes(case, RING)
    # A tensor map has no strides of 0, and addresses are multiples of 16 bytes.
    case.x = wide.x[:1, :1040, :17, :28].expand(3, -1, -1, -1)
    assert kernels(case.forward) == ["channel_band"]
    case.check()
    case.x = wide.x[:3, 4:1044, :17, :28]
    assert "channel_ring" not in kernels(case.forward)
    case.check()
    check_routes(Case((1, 1040, 30, 56), 7, BF16, "cuda", **order), CHANNELS)


@pytest.mark.cuda
@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [5, 7])
def test_what_follows(taps, dtype):
    for shape in ((3, 1040, 17, 28), (33, 776, 7, 7)):
        case = Case(shape, taps, dtype, "cuda", orders=(True, True))
        doubles = [t.double() for t in (case.x, case.weight, case.bias)]
        vectors = [torch.randn(shape[1], device="cuda") for _ in range(4)]
        vectors[1] = vectors[1].abs() + 0.5
        nothing = [None] * 4
        for activation, of in itertools.product(("", *ACTIVATIONS), (vectors, nothing)):
            if not activation and of is nothing:
                continue
            after = (*of, 1e-3, activation)
            call = functools.partial(ops.depthwise_conv, case.x, case.weight, case.bias, *case.numbers, None, *after)
            assert kernels(call) == ["channel_ring"]
            doubled = [v if v is None else v.double() for v in of]
            got, want = call(), reference(*doubles, *case.numbers, *doubled, 1e-3, activation)
            assert (got.double() - want).norm() < 2 * TOLERANCE[dtype] * want.norm(), activation


@pytest.mark.cuda
@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [5, 7])
def test_what_is_not_finite_reaches_what_depends_on_it(taps, dtype):
    for shape in ((3, 1040, 17, 28), (33, 776, 7, 7), (2, 616, 10, 112)):
        case = Case(shape, taps, dtype, "cuda", orders=(True, True))
        case.x[1, 3, 5, 4], case.x[0, 9, -1, 5], case.x[-1, -1, 0, 0], case.x[0, 20, 3, -1] = (
            float(v) for v in ("inf", "nan", "-inf", "inf")
        )
        case.weight[4, 0, 0, 0], case.weight[12, 0, -1, 1] = float("-inf"), float("nan")
        case.grad[0, 7, 0, 0], case.grad[1, 1, -1, -1] = float("inf"), float("nan")
        case.bias[11] = float("inf")
        assert kernels(case.forward) == ["channel_ring"]
        for name, got, want in zip(("y", "dx", "dw", "db"), case.ours(), case.tap_by_tap()):
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(got.cpu()), kind(want)), name


@pytest.mark.cuda
@needs_sm90
def test_in_cuda_graphs_and_on_other_streams():
    case = Case((3, 1040, 17, 28), 7, BF16, "cuda", orders=(True, True))
    want = case.forward()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = case.forward()
    stream.synchronize()
    assert torch.equal(aside, want)
    with torch.cuda.graph(graph):
        result = case.forward()
    case.x.copy_(case.x.clone().mul_(2))
    result.zero_()
    graph.replay()
    assert torch.equal(result, case.forward()) and not torch.equal(result, want)
