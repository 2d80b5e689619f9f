"""``causal_conv1d`` and its backward against the same convolution in fp64, for each kind of row that a kernel treats differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_convolution import TOLERANCE, Case

ops = torch.ops.fusebackend
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 31, 64, 129, 768, 1134])
def test_2_to_4_taps_match_fp64_at_any_length(device, dtype, channels_last, length):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("there are no CUDA kernels for fp64")
    for channels, taps, silu in ((8, 4, True), (5, 4, False), (16, 3, True), (1, 2, False)):
        Case(2, channels, length, taps, dtype, device, channels_last=channels_last, silu=silu).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length, taps", [(64, 64), (129, 129), (768, 768), (700, 31), (500, 128), (60, 200), (1, 300), (1025, 513)])
def test_31_to_768_taps_match_fp64_at_any_batch_size(device, dtype, length, taps):
    for batch, channels, silu in ((1, 2, False), (3, 3, True), (9, 1, False), (17, 2, False)):
        Case(batch, channels, length, taps, dtype, device, silu=silu, bias=batch != 3).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("taps", [5, 8, 12, 16, 24, 31, 40, 70])
def test_5_to_70_taps_match_fp64_in_both_memory_orders(device, channels_last, taps):
    for dtype in (torch.float32, torch.bfloat16):
        for length in (96, 101):
            Case(24, 66, length, taps, dtype, device, channels_last=channels_last, silu=length == 96).check()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("taps, left", [(17, 16), (31, 15), (31, 30), (33, 32), (65, 32), (20, 3), (31, 0)])
def test_tens_of_taps_on_16_bit_rows_stay_in_registers(dtype, taps, left):
    aligned = (5, 7, 16), (9, 3, 40), (32, 6, 1000), (17, 40, 1032), (64, 4, 96)
    for batch, channels, length in (*aligned, (5, 7, 13), (9, 3, 41), (32, 6, 999), (17, 40, 1030), (64, 4, 95)):
        case = Case(batch, channels, length, taps, dtype, "cuda", left=left, out=length, silu=batch == 9, bias=batch != 5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            first = case.forward()
        assert any("register_toeplitz" in e.name for e in profiled.events())
        assert torch.equal(first, case.forward())
        case.check()
        case.x[0, 0, length // 2], case.x[-1, -1, 0] = float("inf"), float("nan")
        case.check_what_is_not_finite()


@pytest.mark.cuda
@pytest.mark.parametrize("first, length", [(3, 96), (3, 97), (8, 101), (1, 7)])
def test_16_bit_rows_that_begin_between_16_byte_boundaries_stay_in_registers(first, length):
    """x begins `first` samples into longer rows. The result's rows are allocated, so x's must be as far from the boundaries as these."""
    case = Case(9, 5, length, 31, torch.bfloat16, "cuda", left=15, out=length)
    longer = torch.randn(9, 5, length + 8 * (first // 8 + 1), device="cuda").bfloat16()
    case.x = longer[..., first : first + length]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        case.forward()
    assert any("register_toeplitz" in e.name for e in profiled.events()) == (first % 8 == 0)
    case.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [100, 131, 300])
def test_hundreds_of_taps_match_fp64_in_any_memory_order(device, taps):
    for dtype in (torch.float32, torch.bfloat16):
        for channels, length in ((16, 300), (37, 130), (70, 701)):
            for channels_last in (False, True):
                case = Case(2, channels, length, taps, dtype, device, channels_last=channels_last, silu=channels == 37)
                case.check()
                case.channels_last = not channels_last
                case.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [3, 4, 9, 31])
def test_results_and_operands_may_differ_in_memory_order(device, taps):
    for dtype in (torch.float32, torch.bfloat16):
        for channels, length in ((34, 150), (7, 64), (72, 200), (64, 1032), (64, 1028), (40, 1030), (24, 1031)):
            for channels_last in (False, True):
                case = Case(2, channels, length, taps, dtype, device, channels_last=channels_last, silu=taps == 4)
                case.channels_last = not channels_last
                case.check()
                case.grad = case.grad.transpose(1, 2).contiguous().transpose(1, 2) if not channels_last else case.grad.contiguous()
                case.check()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_thousands_of_samples_match_fp64(dtype):
    Case(2, 2, 8192, 8192, dtype, "cuda").check()
    Case(3, 2, 5000, 4999, dtype, "cuda", silu=True).check()
    Case(4, 2, 20000, 7, dtype, "cuda").check()


@pytest.mark.cuda
@pytest.mark.parametrize("length, taps", [(3500, 3500), (4096, 4096), (4097, 6000), (8192, 8192)])
def test_weight_gradients_of_thousands_of_taps_are_computed_by_fft_and_repeatable(length, taps):
    for dtype, batch, channels_last in ((torch.float32, 1, False), (torch.float32, 5, True), (torch.bfloat16, 16, False)):
        case = Case(batch, 3, length, taps, dtype, "cuda", channels_last=channels_last)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            first = case.backward()
        if length in (4096, 8192):
            assert any("fft_weight_grad" in e.name for e in profiled.events())
        case.check()
        assert all(torch.equal(a, b) for a, b in zip(first, case.backward()))


@pytest.mark.cuda
def test_an_infinity_reaches_only_the_weight_gradients_of_taps_that_meet_it():
    case = Case(3, 2, 4096, 4096, torch.float32, "cuda")
    case.x[1, 1, 1000] = float("inf")
    _, dw, db = case.backward()
    affected = ~torch.isfinite(dw)
    expected = torch.zeros_like(affected)
    expected[1, 0, 1000:] = True  # tap k of output t is sample t - 4095 + k
    assert torch.equal(affected, expected) and torch.isfinite(db).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 2, 31, 64, 129, 768, 1134, 2048, 8192])
def test_one_batch_entry_of_five_channels_matches_fp64_at_any_length(device, length):
    for taps in (4, 31, 128, *([1024] if length <= 2048 else [])):
        for channels_last in (False, True):
            Case(1, 5, length, taps, torch.float32, device, channels_last=channels_last, silu=taps == 4).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [3, 5, 31, 64, 200])
def test_padding_on_both_sides_matches_fp64(device, taps):
    for length in (1, 40, 300):
        left = (taps - 1) // 2
        Case(3, 4, length, taps, torch.float32, device, left=left, out=length).check()
        if length > taps:
            Case(3, 4, length, taps, torch.bfloat16, device, left=0, out=length - taps + 1, silu=True).check()


def test_avx2_kernels_match_fp64():
    """Selected by PyTorch's variable, also on processors with AVX-512."""
    code = """
import torch
import fusebackend
from one_convolution import TOLERANCE, Case
fusebackend.load_operators()
for dtype in TOLERANCE:
    for taps, length in ((4, 131), (31, 200), (200, 300)):
        for channels_last in (False, True):
            Case(2, 70, length, taps, dtype, "cpu", channels_last=channels_last, silu=taps == 4).check()
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_gradients_agree_with_finite_differences():
    case = Case(2, 3, 9, 4, torch.float64, "cpu", silu=True)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            case.x, case.weight, case.bias = x, weight, bias
            return case.forward()

        @staticmethod
        def backward(ctx, grad):
            case.grad = grad
            return case.backward()

    leaves = [t.clone().requires_grad_() for t in (case.x, case.weight, case.bias)]
    assert torch.autograd.gradcheck(Function.apply, leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length, taps", [(300, 4), (300, 31), (512, 512)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_repeated_calls_give_the_same_bits(device, length, taps, channels_last):
    case = Case(6, 40, length, taps, torch.float32, device, channels_last=channels_last, silu=True)
    first = case.ours()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, case.ours()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [4, 20, 200])
def test_an_infinity_reaches_only_the_outputs_that_depend_on_it(device, taps):
    case = Case(4, 3, 300, taps, torch.float32, device)
    case.x[1, 2, 150] = float("inf")
    case.x[2, 1, 299] = float("nan")
    affected = ~torch.isfinite(case.forward())
    expected = torch.zeros_like(affected)
    expected[1, 2, 150 : 150 + taps] = True
    expected[2, 1, 299:] = True
    assert torch.equal(affected, expected)


def _inf_or_nan(case, operand, place, value):
    """Writes one number that is not finite: at the start, in the middle or at the end of a row of the second channel."""
    row = {"weight": case.weight[1, 0], "x": case.x[-1, 1], "grad": case.grad[-1, 1]}[operand]
    row[{"start": 0, "middle": row.numel() // 2, "end": -1}[place]] = value
    case.check_what_is_not_finite(f"{value} at the {place} of {operand}, {case.x.dtype}, silu {case.silu}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["bct", "btc", "btc to bct"])
@pytest.mark.parametrize(
    "channels, length, taps",
    [(5, 61, 4), (8, 64, 4), (72, 300, 3), (40, 257, 4), (16, 60, 2), (5, 100, 9), (66, 96, 12), (34, 101, 31), (3, 64, 40), (3, 64, 64),
     (2, 300, 300), (66, 700, 131), (2, 40, 300)],
)  # fmt: skip
def test_infinities_and_nans_reach_what_they_reach_in_eager(device, order, channels, length, taps):
    """Zeros that eager mode pads with are multiplied; those beyond what a gradient belongs to are not."""
    for dtype in (torch.float32, torch.bfloat16):
        for silu in (False, True):
            for i, operand in enumerate(("weight", "x", "grad")):
                for j, place in enumerate(("start", "middle", "end")):
                    case = Case(2, channels, length, taps, dtype, device, channels_last=order != "bct", silu=silu)
                    if order == "btc to bct":
                        case.channels_last, case.grad = False, case.grad.contiguous()
                    _inf_or_nan(case, operand, place, (float("inf"), float("nan"), float("-inf"))[(i + j) % 3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [3, 9, 31, 64, 200])
def test_infinities_and_nans_reach_no_further_with_padding_on_both_sides(device, taps):
    for left in (0, 1, taps // 2, taps + 1):
        for operand in ("weight", "x", "grad"):
            for place in ("start", "end"):
                case = Case(3, 4, 90, taps, torch.float32, device, left=left, out=90 + max(0, left - taps + 1))
                _inf_or_nan(case, operand, place, float("inf"))


@pytest.mark.cuda
@pytest.mark.parametrize("batch, length, taps", [(16, 700, 640), (2, 4096, 4096), (2, 6000, 5000), (1, 9000, 300)])
def test_infinities_and_nans_in_rows_of_thousands_of_samples_reach_what_they_reach_in_eager(batch, length, taps):
    """On tensor cores and by FFT, and in more tiles of shared memory than one."""
    for dtype in (torch.float32, torch.bfloat16):
        for operand in ("weight", "x", "grad"):
            for place in ("start", "end"):
                _inf_or_nan(Case(batch, 2, length, taps, dtype, "cuda", bias=False), operand, place, float("inf"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["bct", "btc"])
@pytest.mark.parametrize("channels, length, taps", [(6, 20, 4), (5, 100, 9), (3, 64, 64), (2, 300, 300), (40, 1000, 4), (32, 600, 300)])
def test_compiled_convolutions_agree_with_eager_in_what_is_not_finite(device, channels, length, taps, order, interpreted):

    def conv(x, w):
        x = x.transpose(1, 2) if order == "btc" else x
        y = torch.nn.functional.conv1d(torch.nn.functional.pad(x, (taps - 1, 0)), w, groups=channels)
        return y.transpose(1, 2) if order == "btc" else y

    for value, tap in ((float("inf"), 0), (float("inf"), taps // 2), (float("nan"), 0), (float("-inf"), taps - 1)):
        w = torch.randn(channels, 1, taps, device=device)
        w[0, 0, tap] = value
        x = torch.randn((2, channels, length) if order == "bct" else (2, length, channels), device=device)
        results = []
        for fn in (conv, interpreted(conv, dynamic=True)):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = fn(*leaves)
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
        for eager, ours in zip(*results):
            assert torch.equal(eager.isnan(), ours.isnan()) and torch.equal(eager.isposinf(), ours.isposinf())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels, length", [(16, 64), (16, 61), (16, 62), (16, 60), (17, 64), (66, 1036)])
def test_an_infinity_in_the_last_sample_reaches_one_weight_gradient(device, channels, length):
    case = Case(2, channels, length, 4, torch.bfloat16, device, channels_last=True, bias=False)
    case.x[1, 3, -1] = float("inf")
    case.channels_last, case.grad = False, case.grad.contiguous()
    dx, dw, _ = case.backward(True, True, False)
    assert torch.isfinite(dx).all()
    assert (~torch.isfinite(dw)).nonzero().tolist() == [[3, 0, 3]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_sliced_inputs_strided_weights_and_expanded_gradients_match_fp64(device, channels_last):
    for taps in (4, 9, 70):
        case = Case(3, 16, 200, taps, torch.float32, device, channels_last=channels_last)
        whole = torch.randn(3, 40, 203, device=device)
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else whole
        case.x = whole[:, 11:27, 3:]
        case.weight = torch.randn(16, 1, 2 * taps, device=device)[..., ::2]
        case.grad = torch.randn(3, 1, 1, device=device).expand(3, 16, 200)
        case.check()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_not_needed_come_back_empty(device):
    for taps in (4, 40):
        case = Case(2, 8, 64, taps, torch.float32, device, silu=True)
        whole = case.backward()
        for needed in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
            for want, got, full in zip(needed, case.backward(*needed), whole):
                assert torch.equal(got, full) if want else got.numel() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_empty_tensors_give_empty_results_and_zero_weight_gradients(device):
    for shape in ((0, 4, 16), (2, 0, 16), (2, 4, 0)):
        x, weight = torch.randn(shape, device=device), torch.randn(shape[1], 1, 3, device=device)
        y = ops.causal_conv1d(x, weight, None, 2, 0, 0.0, False, False)
        assert y.shape == shape
        dx, dw, db = ops.causal_conv1d_backward(y, x, weight, None, 2, 0.0, False, False, True, True, True)
        assert dx.shape == shape and not dw.any() and not db.any()


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device):
    for channels_last in (False, True):
        case = Case(2, 4, 12, 3, torch.float32, device, channels_last=channels_last)
        forward = (case.x, case.weight, case.bias, case.left, case.right, case.shift, True, channels_last)
        backward = (
            case.grad,
            case.x,
            case.weight,
            case.bias,
            case.left,
            case.shift,
            True,
            channels_last,
            True,
            True,
            True,
        )
        torch.library.opcheck(ops.causal_conv1d.default, forward)
        torch.library.opcheck(ops.causal_conv1d_backward.default, backward)


def test_operands_of_other_shapes_or_dtypes_are_errors():
    x, weight = torch.randn(2, 4, 8), torch.randn(4, 1, 3)
    for arguments, words in (
        ((x, torch.randn(5, 1, 3), None, 2, 0), "weight must be"),
        ((x, weight.double(), None, 2, 0), "dtype and device"),
        ((x, weight, torch.randn(3), 2, 0), "bias must be"),
        ((x[0], weight, None, 2, 0), "batch, channels, time"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ops.causal_conv1d(*arguments, 0.0, False, False)
