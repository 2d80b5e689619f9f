"""The kernels against PyTorch in fp64: every form, memory order and dtype, on CPUs and GPUs."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_depthwise_convolution import DTYPES, TOLERANCE, Case, ops

from fusebackend.native import loader


@pytest.fixture(autouse=True)
def has_kernels(device):
    reason = loader.load().why_not(device)
    if reason:
        pytest.skip(reason)


# What each kernel is for: bands of each width in each step, planes that share a tile and planes in several, odd sizes.
FORMS = {
    "3x3": ((3, 16, 17, 28), 3, {}),
    "5x5 odd": ((2, 24, 9, 13), 5, {}),
    "7x7": ((2, 16, 56, 56), 7, {}),
    "7x7 small planes": ((9, 33, 7, 7), 7, {}),
    "7x7 of two columns": ((5, 8, 14, 14), 7, {}),
    "9x9": ((1, 3, 20, 30), 9, {}),
    "12x12": ((2, 8, 30, 64), 12, dict(padding=(5, 6, 5, 6))),
    "31x31": ((1, 8, 56, 56), 31, {}),
    "1x7": ((2, 8, 12, 40), (1, 7), {}),
    "7x1": ((2, 8, 40, 12), (7, 1), {}),
    "3x3 stride 2": ((3, 16, 28, 28), 3, dict(stride=2)),
    "5x5 stride 2 odd": ((2, 8, 15, 33), 5, dict(stride=2)),
    "7x7 stride 2 without padding": ((2, 8, 30, 30), 7, dict(stride=2, padding=(0, 0, 0, 0))),
    "20 columns stride 2": ((1, 8, 9, 60), (3, 20), dict(stride=2)),
    "strides differ": ((2, 8, 20, 20), 3, dict(stride=(2, 1))),
    "strides differ too": ((2, 8, 20, 20), 3, dict(stride=(1, 2))),
    "3x3 stride 3": ((2, 8, 20, 20), 3, dict(stride=3)),
    "stride larger than the kernel": ((2, 8, 20, 20), 1, dict(stride=2)),
    "3x3 dilated": ((2, 16, 20, 20), 3, dict(dilation=2)),
    "dilations differ": ((2, 4, 30, 30), (3, 5), dict(dilation=(3, 1), stride=(1, 2))),
    "one row, dilation 8": ((16, 12, 1, 600), (1, 3), dict(dilation=(1, 8), padding=(0, 0, 16, 0))),
    "one row, wide": ((2, 3, 1, 1100), (1, 5), dict(dilation=(1, 2), stride=(1, 2))),
    "dilation beyond a tile": ((1, 2, 1, 900), (1, 3), dict(dilation=(1, 300))),
    "one row of four, dilation 8": ((3, 12, 1, 512), (1, 4), dict(dilation=(1, 8), padding=(0, 0, 24, 0))),
    "one row of seven, dilation 3": ((2, 3, 2, 301), (1, 7), dict(dilation=(1, 3))),
    "one dilated row, cropped": ((2, 3, 1, 130), (1, 2), dict(dilation=(1, 5), padding=(0, 0, -3, -20))),
    "padding on one side": ((2, 8, 12, 12), 3, dict(padding=(0, 2, 1, 0))),
    "cropped": ((2, 8, 16, 16), 3, dict(padding=(-2, 0, 1, -3))),
    "more padding than taps": ((2, 8, 6, 6), 3, dict(padding=(5, 4, 5, 6))),
    "two outputs a channel": ((2, 8, 14, 20), 3, dict(multiplier=2)),
    "three outputs a channel, stride 2": ((2, 5, 14, 20), 5, dict(multiplier=3, stride=2)),
    "one channel": ((3, 1, 20, 24), 5, {}),
    "wide image": ((1, 8, 6, 300), 5, {}),
    "high image": ((1, 8, 300, 6), 7, {}),
    "1x1 image": ((4, 24, 1, 1), 3, {}),
    "channels of no whole vectors": ((2, 37, 9, 11), 3, {}),
    "several blocks of channels": ((3, 200, 7, 7), 7, {}),
    "columns of several tiles": ((1, 3, 20, 1100), 3, {}),
    "rows of several tiles": ((1, 2, 700, 70), 5, {}),
    "stride and dilation share a factor": ((2, 16, 21, 22), 3, dict(stride=2, dilation=2)),
    "strides 4 and 3": ((2, 24, 30, 25), 5, dict(stride=(4, 3), dilation=(2, 1))),
    "even taps": ((2, 8, 16, 16), (4, 2), dict(padding=(1, 2, 0, 1))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_order(form, dtype, device):
    shape, taps, more = FORMS[form]
    for channels_last in (False, True):
        Case(shape, taps, dtype, device, orders=(channels_last,) * 2, **more).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_orders_may_differ(dtype, device):
    for x, grad, result in itertools.product((False, True), (False, True), (None, False, True)):
        case = Case((2, 16, 12, 16), 3, dtype, device, orders=(x, grad), result=result)
        case.check()
        wanted = torch.channels_last if (x if result is None else result) else torch.contiguous_format
        y, dx, dw, _ = case.ours()
        assert y.is_contiguous(memory_format=wanted) and dx.is_contiguous(memory_format=wanted) and dw.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_misaligned_memory(dtype, channels_last, device):
    for offset in (1, 2, 4):
        Case((2, 16, 12, 16), 5, dtype, device, orders=(channels_last,) * 2, offset=offset).check()


def test_slices_and_expanded_tensors(device):
    case = Case((2, 8, 12, 16), 3, torch.bfloat16, device)
    wide = torch.randn(2, 24, 14, 40, device=device).bfloat16()
    for x in (wide[:, 8:16, 1:13, 3:19], wide[:, ::3, 2:, :16][:, :, :12], wide[:1, :8, :12, :32:2].expand(2, -1, -1, -1)):
        case.x = x
        case.check()
    case.grad = torch.ones((), device=device, dtype=torch.bfloat16).expand_as(case.grad)
    case.check()
    case.weight = torch.randn(3, 3, 8, 1, device=device).bfloat16().permute(2, 3, 1, 0)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_forms(dtype, device):
    draw = random.Random(0)
    done = 0
    while done < 40:
        shape = (draw.randint(1, 5), draw.choice((1, 3, 8, 16, 40)), draw.randint(1, 40), draw.randint(1, 70))
        taps, stride = (draw.randint(1, 9), draw.randint(1, 12)), (draw.randint(1, 3), draw.randint(1, 3))
        dilation, padding = (draw.choice((1, 1, 2)), draw.choice((1, 1, 3))), [draw.randint(-1, 6) for _ in range(4)]
        rooms = (shape[2 + d] + sum(padding[2 * d : 2 * d + 2]) - dilation[d] * (taps[d] - 1) for d in range(2))
        if min(rooms) < 1:
            continue
        orders, multiplier = (draw.random() < 0.5, draw.random() < 0.5), draw.choice((1, 1, 2))
        more = dict(stride=stride, dilation=dilation, padding=padding, multiplier=multiplier, orders=orders)
        Case(shape, taps, dtype, device, **more).check()
        done += 1


def test_avx2_kernels_match_fp64():
    """Selected by PyTorch's variable, also on processors with AVX-512."""
    code = """
import fusebackend
from one_depthwise_convolution import DTYPES, Case
fusebackend.load_operators()
for dtype in DTYPES:
    wide = (1, 16, 1, 300), (1, 7), dict(dilation=(1, 2))
    for shape, taps, more in (((2, 24, 17, 28), 3, {}), ((2, 20, 15, 33), 5, dict(stride=2)), wide):
        for channels_last in (False, True):
            Case(shape, taps, dtype, "cpu", orders=(channels_last,) * 2, **more).check()
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_float64_on_cpus():
    for form in ("3x3", "5x5 stride 2 odd", "dilations differ", "three outputs a channel, stride 2"):
        shape, taps, more = FORMS[form]
        Case(shape, taps, torch.float64, "cpu", **more).check()


@pytest.mark.parametrize("needed", [n for n in itertools.product((False, True), repeat=3) if any(n)])
def test_each_gradient_alone_and_together(needed, device):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case((2, 16, 12, 16), 3, dtype, device)
        for want, got, need in zip(case.backward(), case.backward(*needed), needed):
            # Gradients of one read of the incoming one are summed in another order than each alone.
            assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max() if need else got.numel() == 0


@pytest.mark.parametrize("form", ["7x7", "31x31", "3x3 stride 2", "one row, dilation 8", "3x3 stride 3"])
def test_the_same_bits_every_time(form, device):
    shape, taps, more = FORMS[form]
    for dtype, channels_last in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        case = Case(shape, taps, dtype, device, orders=(channels_last,) * 2, **more)
        first = case.ours()
        for _ in range(3):
            assert all(map(torch.equal, first, case.ours()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_not_finite_reaches_what_depends_on_it(dtype, channels_last, device):
    for taps, stride in ((3, 1), (7, 1), (5, 2), (3, 3)):
        case = Case((2, 16, 17, 20), taps, dtype, device, stride=stride, orders=(channels_last,) * 2)
        case.x[1, 3, 5, 7], case.x[0, 9, 16, 19] = float("inf"), float("nan")
        case.weight[4, 0, 0, 0], case.weight[12, 0, -1, 1] = float("-inf"), float("nan")
        case.grad[0, 7, 0, 0], case.grad[1, 1, -1, -1] = float("inf"), float("nan")
        case.bias[11] = float("inf")
        for name, got, want in zip(("y", "dx", "dw", "db"), case.ours(), case.tap_by_tap()):
            got = got.cpu()
            same = torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isposinf(), want.isposinf())
            assert same and torch.equal(got.isneginf(), want.isneginf()), (name, taps, stride)


def test_empty_batches(device):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = (torch.randn(s, device=device).to(dtype) for s in ((0, 8, 5, 5), (8, 1, 3, 3), (8,)))
        y = ops.depthwise_conv(x, weight, bias, [1, 1], [1, 1, 1, 1], [1, 1], None)
        assert y.shape == (0, 8, 5, 5)
        dx, dw, db = ops.depthwise_conv_backward(y, x, weight, [1, 1], [1, 1, 1, 1], [1, 1], None, False, True, True, True)
        assert dx.shape == x.shape and not dw.any() and not db.any()


@pytest.mark.parametrize("form", ["7x7", "3x3 stride 2", "31x31"])
def test_errors_are_no_larger_than_eagers(form, device):
    shape, taps, more = FORMS[form]
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(shape, taps, dtype, device, **more)
        for name, ours, eager, exact in zip(("y", "dx", "dw", "db"), case.ours(), case.torchs(dtype), case.torchs()):
            errors = [(t.double() - exact).norm().item() for t in (ours, eager)]
            assert errors[0] <= 1.2 * errors[1] + 1e-7 * exact.norm(), (name, dtype, errors)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_and_side_streams(device):
    if device.type != "cuda":
        pytest.skip("of GPUs")
    case = Case((4, 32, 28, 28), 7, torch.bfloat16, device)
    want = case.ours()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.ours()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.ours()
    for t in got:
        t.fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, got, want))
