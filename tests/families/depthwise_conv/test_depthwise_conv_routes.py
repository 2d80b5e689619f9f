"""Which CUDA kernel a convolution runs on, and that each is right at the edges of what it takes."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from one_depthwise_convolution import Case

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLANES = ("depthwise_rolling_band", "depthwise_rolling_band", "depthwise_row_products")
CHANNELS = ("depthwise_channel_band", "depthwise_channel_band", "depthwise_channel_products")
WINDOW = ("depthwise_rolling_window", "depthwise_rolling_window", "depthwise_rolling_weight_grad")
STRIDED = ("depthwise_rolling_window", "depthwise_rolling_input_grad", "depthwise_rolling_weight_grad")
TILES = ("depthwise_toeplitz", "depthwise_toeplitz", "depthwise_outer_products")


def kernels(call):
    """The names of the kernels of this family that ``call`` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    found = (re.search(r"depthwise_(?!conv\b)(\w+)", e.name) for e in profiled.events())
    return [name[1] for name in found if name]


def check_routes(case, routes):
    forward, of_x, of_weight = (r.removeprefix("depthwise_") for r in routes)
    assert kernels(case.forward) == [forward]
    assert sorted(kernels(case.backward)) == sorted([of_x, of_weight, "reduce"])
    case.check()
    first = case.ours()
    assert all(map(torch.equal, first, case.ours()))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [3, 5, 7])
def test_16_bit_planes_roll_on_tensor_cores(taps, dtype):
    # One strip and several groups of them; a last block of two, four and six columns; rows of fewer than the taps, and of several tiles.
    small = (9, 34, 7, 8), (2, 24, 14, 14), (17, 3, 2, 10), (40, 5, 9, 6)
    odd = (3, 16, 17, 29), (20, 34, 7, 7), (2, 5, 40, 67), (3, 2, 9, 1)
    for shape in ((3, 16, 17, 28), (1, 130, 25, 60), (5, 2, 120, 202), (1, 1, 300, 4), *small, *odd):
        check_routes(Case(shape, taps, dtype, "cuda"), PLANES)
    check_routes(Case((2, 16, 20, 28), taps, dtype, "cuda", offset=1), PLANES)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_channels_last_rolls_down_columns(taps):
    shapes = (3, 18, 17, 29), (9, 34, 7, 7), (1, 130, 25, 61), (5, 2, 120, 31), (2, 142, 3, 5), (40, 6, 9, 1)
    for dtype, shape in itertools.product((BF16, FP16, FP32), shapes):
        check_routes(Case(shape, taps, dtype, "cuda", orders=(True, True)), WINDOW)
    check_routes(Case((3, 16, 17, 29), taps, BF16 if taps == 3 else FP32, "cuda", orders=(True, True)), WINDOW)
    check_routes(Case((3, 16, 17, 28), taps, BF16, "cuda", orders=(True, True), offset=2), WINDOW)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [5, 7])
def test_channels_last_runs_on_tensor_cores(taps, dtype):
    # Segments of one strip to sixteen, several of them, and tiles of columns; the last of each is not full.
    small = (9, 8, 7, 7), (3, 24, 14, 14), (17, 8, 2, 10), (40, 16, 9, 6), (3, 8, 9, 1), (1, 40, 300, 4)
    wide = (3, 16, 17, 28), (5, 8, 30, 56), (1, 136, 25, 61), (2, 8, 20, 112), (2, 8, 9, 130), (1, 24, 12, 300)
    for shape in (*small, *wide):
        check_routes(Case(shape, taps, dtype, "cuda", orders=(True, True)), CHANNELS)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_channels_last_rolls_down_columns_by_two(taps):
    shapes = (3, 18, 17, 29), (9, 34, 7, 7), (1, 130, 25, 60), (5, 2, 121, 31), (2, 144, 14, 14), (40, 6, 9, 1)
    for dtype, shape in itertools.product((BF16, FP16, FP32), shapes):
        check_routes(Case(shape, taps, dtype, "cuda", stride=2, orders=(True, True)), STRIDED)
    for padding in ((0, 0, 0, 0), (1, 0, 2, 1), (6, 3, 3, 3), (-1, 2, 3, 5), (2, 2, -3, 4), (9, 9, 9, 9), (-12, 9, 1, 1)):
        check_routes(Case((3, 10, 19, 24), taps, BF16, "cuda", stride=2, padding=padding, orders=(True, True)), STRIDED)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_fp32_planes_roll_down_columns(taps):
    for shape in ((3, 16, 17, 28), (9, 33, 7, 8), (1, 130, 25, 60), (5, 2, 120, 200), (17, 3, 2, 12), (2, 1, 300, 4)):
        check_routes(Case(shape, taps, FP32, "cuda"), WINDOW)


def test_what_these_do_not_take_runs_on_tiles():
    for more in (dict(stride=2), dict(dilation=2)):
        check_routes(Case((2, 16, 20, 28), 3, BF16, "cuda", **more), TILES)
    # Several outputs of a channel are convolutions of the same plane; its gradient is the sum of theirs.
    check_routes(Case((2, 16, 20, 28), 3, BF16, "cuda", multiplier=2), (PLANES[0], "depthwise_direct_input_grad", TILES[2]))
    for shape, taps, channels_last, dtype in (
        ((2, 16, 20, 28), 9, False, BF16),
        ((2, 16, 20, 28), (3, 4), True, BF16),
        ((2, 33, 20, 28), 3, True, FP16),
    ):
        check_routes(Case(shape, taps, dtype, "cuda", orders=(channels_last,) * 2), TILES)
    assert kernels(Case((2, 16, 20, 28), 3, BF16, "cuda", result=True).forward) == ["toeplitz"]
    register = ("depthwise_window_forward", "depthwise_window_forward", "depthwise_window_weight_grad")
    check_routes(Case((2, 16, 20, 29), 3, FP32, "cuda"), register)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_padding_of_any_kind(dtype, channels_last):
    paddings = (0, 0, 0, 0), (1, 0, 2, 1), (6, 3, 3, 3), (-1, 2, 3, 5), (2, 2, -3, 4), (9, 9, 9, 9)
    for taps, padding in itertools.product((3, 5, 7), paddings):
        Case((3, 10, 19, 24), taps, dtype, "cuda", padding=padding, orders=(channels_last,) * 2).check()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_memory_of_any_kind(dtype):
    case = Case((2, 8, 12, 16), 5, dtype, "cuda")
    wide = torch.randn(2, 26, 14, 40, device="cuda").to(dtype)
    last = wide.to(memory_format=torch.channels_last)
    for source in (wide, last):
        corners = source[:, 8:16, 1:13, 4:20], source[:, 9:17, 1:13, 3:19], source[:, :24:3, 2:, :16]
        for case.x in (*corners, source[:1, :8, :12, :16].expand(2, -1, -1, -1)):
            case.check()
    weight = case.weight
    channels_inside = weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    for case.weight in (weight.transpose(2, 3), weight[:1].expand_as(weight), channels_inside):
        case.check()
    case.grad = torch.ones((), device="cuda", dtype=dtype).expand_as(case.grad)
    case.check()
