"""Which CUDA kernel a convolution runs on, and that each is right at the edges of what it takes."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
from one_depthwise_convolution import TOLERANCE, Case

from fusebackend.patterns.depthwise_conv.ops import reference

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
    # Nothing is aligned to 16 bytes: what is may wait in shared memory.
    small = (9, 34, 7, 8), (2, 24, 14, 14), (17, 3, 2, 10), (40, 5, 9, 6)
    odd = (3, 16, 17, 29), (20, 34, 7, 7), (2, 5, 40, 67), (3, 2, 9, 1)
    for shape in ((3, 16, 17, 28), (1, 130, 25, 60), (5, 2, 120, 202), (1, 1, 300, 4), *small, *odd):
        check_routes(Case(shape, taps, dtype, "cuda", offset=4), PLANES)
    for offset in (1, 2):
        check_routes(Case((2, 16, 20, 28), taps, dtype, "cuda", offset=offset), PLANES)


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_channels_last_rolls_down_columns(taps):
    shapes = (3, 18, 17, 29), (9, 34, 7, 7), (1, 130, 25, 61), (5, 2, 120, 31), (2, 142, 3, 5), (40, 6, 9, 1)
    for dtype, shape in itertools.product((BF16, FP16, FP32), shapes):
        check_routes(Case(shape, taps, dtype, "cuda", orders=(True, True)), WINDOW)
    check_routes(Case((3, 16, 17, 29), taps, BF16 if taps == 3 else FP32, "cuda", orders=(True, True)), WINDOW)
    check_routes(Case((3, 16, 17, 28), taps, BF16, "cuda", orders=(True, True), offset=2), WINDOW)


needs_sm90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9.0"
)


def check_rings(case, forward=True):
    """Both gradients are one kernel; x's alone is a forward, if `forward` says that these are taken too."""
    alone = "row_ring" if forward else "rolling_window"
    assert kernels(case.forward) == [alone]
    assert kernels(case.backward) == ["row_ring_gradients", "reduce"]
    assert kernels(lambda: case.backward(True, False, False)) == [alone]
    assert kernels(lambda: case.backward(True, False, True)) == ["row_ring_gradients", "reduce"]
    assert kernels(lambda: case.backward(False, True, True)) == ["rolling_weight_grad", "reduce"]
    case.check()
    first = case.ours()
    assert all(map(torch.equal, first, case.ours()))
    x_alone, of_weight, of_bias = case.backward(True, False, False)[0], case.backward(True, True, False), case.backward(True, False, True)
    assert (x_alone - first[1]).abs().max() <= TOLERANCE[case.x.dtype] * first[1].abs().max()
    assert torch.equal(of_weight[0], first[1]) and torch.equal(of_weight[1], first[2])
    assert torch.equal(of_bias[0], first[1]) and torch.equal(of_bias[2], first[3])


@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_of_large_channels_last_images_wait_in_shared_memory(dtype):
    # One block a multiprocessor and several; segments, the last of which is shorter; parts of a pixel's channels; last columns of no whole
    # group; one image.
    wide = (40, 24, 100, 300), (2, 96, 300, 300), (1, 16, 1000, 1201)
    for shape in ((64, 144, 56, 56), (256, 32, 56, 56), (500, 40, 31, 29), (64, 1536, 14, 14), *wide):
        check_rings(Case(shape, 3, dtype, "cuda", orders=(True, True)))
    # Blocks that have several images each.
    check_rings(Case((600, 288, 7, 14), 3, dtype, "cuda", orders=(True, True)))
    check_rings(Case((256, 1152, 7, 7), 3, dtype, "cuda", orders=(True, True)), forward=dtype == FP32)


@needs_sm90
def test_rows_wait_where_they_are_dense_and_aligned():
    shape, order = (64, 144, 56, 56), dict(orders=(True, True))
    check_routes(Case(shape, 3, BF16, "cuda", offset=2, **order), WINDOW)
    check_routes(Case((64, 148, 56, 56), 3, BF16, "cuda", **order), WINDOW)
    check_routes(Case(shape, 3, BF16, "cuda", padding=(0, 0, 1, 1), **order), WINDOW)
    wide = Case((64, 152, 56, 56), 3, BF16, "cuda", **order)
    case = Case(shape, 3, BF16, "cuda", **order)
    case.x = wide.x[:, :144]
    check_routes(case, (WINDOW[0], "depthwise_row_ring", WINDOW[2]))  # x's gradient alone does not read x


@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rows_that_wait_and_numbers_that_are_not_finite(dtype):
    """Padding is not multiplied, and what is not finite reaches what it is a factor of alone."""
    case = Case((256, 16, 64, 70), 3, dtype, "cuda", orders=(True, True))
    case.weight[3, 0, 0, 0] = float("inf")
    case.weight[5, 0, 2, 1] = float("nan")
    case.x[1, 7, 0, 0] = case.x[200, 7, 63, 69] = float("inf")
    case.grad[2, 9, 0, 5] = case.grad[255, 9, 40, 69] = float("-inf")
    assert kernels(case.forward) == ["row_ring"] and kernels(case.backward) == ["row_ring_gradients", "reduce"]
    for got, want in zip(case.ours(), case.tap_by_tap()):
        got, want = got.double().cpu(), want.double()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        finite = want.isfinite()
        assert (got - want)[finite].abs().max() <= 4 * TOLERANCE[dtype] * want[finite].abs().max()


@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_that_wait_err_no_more_than_eager(dtype):
    case = Case((64, 144, 56, 56), 3, dtype, "cuda", orders=(True, True))
    for ours, eager, exact in zip(case.ours(), case.torchs(dtype), case.torchs()):
        assert (ours.double() - exact).norm() <= 1.05 * (eager.double() - exact).norm() + 1e-7 * exact.norm()


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


def is_wide(call):
    """Whether the kernel that ``call`` launches has eight columns of fp32 planes a thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    (name,) = (e.name for e in profiled.events() if "depthwise_rolling_window" in e.name)
    return "Rolling)1" in name


def test_threads_have_eight_columns_of_large_fp32_planes():
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    # Blocks of 128 strips of a channel, three a multiprocessor: whole rows of strips, one of which is half a strip, and no whole block.
    for batch, width, rows in ((64, 56, 56), (64, 52, 33), (63, 60, 7), (32, 28, 5)):
        channels = max(3 * multiprocessors // -(-batch * -(-width // 8) // 128), 1)
        case = Case((batch, channels, rows, width), 7, FP32, "cuda")
        assert is_wide(case.forward) and is_wide(lambda case=case: case.backward(True, False, False))
        check_routes(case, WINDOW)
    case.x[1, 3, 2, 7], case.x[0, 9, 4, 27], case.weight[4, 0, 0, 0] = float("inf"), float("nan"), float("-inf")
    assert is_wide(case.forward)
    for name, got, want in zip(("y", "dx", "dw", "db"), case.ours(), case.tap_by_tap()):
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(got.cpu()), kind(want)), name
    case = Case((64, 3 * multiprocessors // 4, 20, 52), 7, FP32, "cuda")
    arguments = (*case.numbers, None, None, None, None, None, 0.0, "relu")
    call = functools.partial(torch.ops.fusebackend.depthwise_conv, case.x, case.weight, case.bias, *arguments)
    assert is_wide(call)
    want = reference(case.x.double(), case.weight.double(), case.bias.double(), *case.numbers).relu()
    assert (call().double() - want).norm() < TOLERANCE[FP32] * want.norm()
    assert not is_wide(Case((3, 16, 17, 28), 7, FP32, "cuda").forward) and not is_wide(Case((64, 96, 56, 56), 5, FP32, "cuda").forward)


def row(shape, taps, dilation, left, right, **more):
    """A convolution by one row of taps; `shape` is (batch, channels, height, width)."""
    return dict(shape=shape, taps=(1, taps), dilation=(1, dilation), padding=(0, 0, left, right), device="cuda", **more)


def check_dilated(case, alone="dilated_rows", bias_together=True):
    """The gradients of x and the weight are one kernel, and the bias's too where a tap's windows have all of the incoming gradient.
    `alone` is the forward's kernel, and so that of x's gradient alone."""
    both, of_weight = ["dilated_rows_gradients", "reduce"], ["dilated_rows_weight_grad", "reduce"]
    assert kernels(case.forward) == [alone]
    assert kernels(lambda: case.backward(True, True, True)) == (both if bias_together else [alone, *of_weight])
    assert kernels(lambda: case.backward(True, True, False)) == both
    assert kernels(lambda: case.backward(True, False, False)) == [alone]
    assert kernels(lambda: case.backward(True, False, True)) == [alone, *of_weight]
    for needed in ((False, True, True), (False, True, False), (False, False, True)):
        assert kernels(lambda needed=needed: case.backward(*needed)) == of_weight
    case.check()
    first = case.ours()
    assert all(map(torch.equal, first, case.ours()))
    wanted = (True, True, False), (True, False, False), (True, False, True), (False, True, True), (False, True, False), (False, False, True)
    for needed in wanted:
        for name, want, got, need in zip(("dx", "dw", "db"), first[1:], case.backward(*needed), needed):
            if not need:
                assert got.numel() == 0
            elif name == "dx" and alone == "dilated_rows":
                assert torch.equal(got, want), needed
            else:  # summed in another order
                scale = want.double().norm() if name == "dx" else max(want.double().norm(), 0.3 * case.grad.double().norm())
                assert (got.double() - want.double()).norm() <= 2 * TOLERANCE[case.x.dtype] * scale, (name, needed)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4, 5, 8])
def test_a_dilated_row_of_taps(taps, dtype):
    halo = 8 * (taps - 1)
    # Whole vectors: of one part of a row and of all, a last part that is shorter, several rows of a plane, sums of several blocks.
    for shape in ((2, 3, 1, 8), (3, 5, 1, 600), (16, 12, 1, 4096), (5, 2, 3, 1000), (70, 1, 1, 4096), (1, 1, 1, 100000)):
        check_dilated(Case(**row(shape, taps, 8, halo, 0, dtype=dtype)))
    # Results that are wider than x: cut off later, as causal convolutions are often written, or not. They are narrower without padding.
    for left, right in ((halo, halo), (halo // 2 // 8 * 8, halo), (0, halo), (0, 0)):
        check_dilated(Case(**row((3, 5, 2, 600), taps, 8, left, right, dtype=dtype)))
        check_dilated(Case(**row((3, 5, 2, 601), taps, 8, left, right, dtype=dtype)))
    # Any width, dilation and padding: more than the width, on both sides, and columns that are cut off.
    for shape, dilation, left, right in (
        ((3, 5, 1, 601), 8, halo, 0),
        ((2, 3, 4, 77), 3, 3 * (taps - 1), 0),
        ((2, 3, 1, 2), 2, 2 * (taps - 1), 5),
        ((2, 3, 1, 40), 100, 100 * (taps - 1), 3),
        ((2, 3, 1, 900), 7, -5, 60),
        ((4, 7, 1, 1031), 16, 300, -9),
    ):
        # Tensor cores take what they reach of many windows that would have to be shifted.
        alone = "toeplitz" if taps == 8 and dtype != FP32 and dilation <= 3 else "dilated_rows"
        check_dilated(Case(**row(shape, taps, dilation, left, right, dtype=dtype)), alone, bias_together=left <= dilation * (taps - 1))
    for offset in (1, 2, 5):
        check_dilated(Case(**row((3, 4, 1, 512), taps, 8, halo, 0, dtype=dtype, offset=offset)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_dilated_rows_of_slices(dtype):
    case = Case(**row((3, 6, 1, 400), 3, 8, 16, 0, dtype=dtype))
    wide = torch.randn(6, 9, 1, 460, device="cuda").to(dtype)
    for case.x in (wide[:3, 2:8, :, 3:403], wide[::2, :6, :, 8:408], wide[:1, :6, :, :400].expand(3, -1, -1, -1)):
        check_dilated(case)
    case.weight = torch.randn(3, 6, device="cuda").to(dtype).t()[:, None, None]
    check_dilated(case)
    # Rows of the incoming gradient alone that begin at multiples of 16 bytes, and of x alone.
    for offsets in ((0, 3), (3, 0)):
        cases = [Case(**row((3, 6, 1, 400), 3, 8, 16, 0, dtype=dtype, offset=offset)) for offset in offsets]
        cases[0].x = cases[1].x
        check_dilated(cases[0])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", [96, 97])
def test_dilated_rows_multiply_no_padding(width, dtype):
    case = Case(**row((2, 6, 1, width), 3, 8, 16, 0, dtype=dtype))
    case.x[1, 3, 0, 7], case.x[0, 4, 0, -1] = float("inf"), float("nan")
    case.weight[1, 0, 0, 0], case.weight[2, 0, 0, 1] = float("-inf"), float("nan")
    case.grad[0, 5, 0, 0], case.grad[1, 0, 0, -1] = float("inf"), float("nan")
    assert kernels(case.forward) == ["dilated_rows"] and kernels(case.backward) == ["dilated_rows_gradients", "reduce"]
    for name, got, want in zip(("y", "dx", "dw", "db"), case.ours(), case.tap_by_tap()):
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(got.cpu()), kind(want)), name


def test_dilated_rows_after_an_epilogue():
    for dtype, width in itertools.product((BF16, FP32), (96, 97)):
        case = Case(**row((2, 6, 1, width), 3, 8, 16, 0, dtype=dtype))
        mean, variance = torch.randn(6, device="cuda"), torch.rand(6, device="cuda") + 0.5
        arguments = (*case.numbers, None, mean, variance, None, None, 1e-3, "silu")
        doubles = [t.double() for t in (case.x, case.weight, case.bias)]
        want = reference(*doubles, *case.numbers, mean.double(), variance.double(), None, None, 1e-3, "silu")
        got = torch.ops.fusebackend.depthwise_conv(case.x, case.weight, case.bias, *arguments)
        assert (got.double() - want).norm() < 2 * TOLERANCE[dtype] * want.norm()


def test_other_rows_of_taps_run_as_before():
    wide = (2, 3, 1, 600)
    for more in (
        row(wide, 3, 1, 2, 0, dtype=BF16),  # not dilated
        row(wide, 9, 2, 16, 0, dtype=BF16),  # more taps
        row(wide, 3, 8, 16, 0, dtype=BF16, stride=(1, 2)),
        row(wide, 3, 8, 16, 0, dtype=BF16, multiplier=2),
        row((2, 3, 4, 600), 3, 8, 16, 0, dtype=BF16) | dict(padding=(1, 1, 16, 0)),
        row((2, 8, 4, 600), 3, 8, 16, 0, dtype=BF16, orders=(True, True)),
    ):
        case = Case(**more)
        assert not any(name.startswith("dilated") for name in (*kernels(case.forward), *kernels(case.backward))), more
        case.check()


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
