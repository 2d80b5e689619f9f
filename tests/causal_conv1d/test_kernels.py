"""causal_conv1d and its backward against the same convolution in fp64, on every kind of row that has its own path."""

from __future__ import annotations

import random

import pytest
import torch

from fusebackend import native
from fusebackend.patterns import causal_conv1d as family

ops = torch.ops.fusebackend
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, cuda])]
# What one rounding of the result, and of a few hundred products, may cost.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def library():
    reason = native.load().why_not(torch.device("cpu"))
    if reason:
        pytest.skip(reason)
    torch.manual_seed(0)


class Case:
    """Random inputs of one convolution, its result and gradients by the op, and by torch in any dtype."""

    def __init__(
        self,
        batch,
        channels,
        length,
        taps,
        dtype,
        device,
        *,
        channels_last=False,
        left=None,
        out=None,
        silu=False,
        bias=True,
        shift=0.25,
    ):
        def rows(n):
            if channels_last:
                return torch.randn(batch, n, channels, device=device, dtype=torch.float64).transpose(1, 2).to(dtype)
            return torch.randn(batch, channels, n, device=device, dtype=torch.float64).to(dtype)

        self.left = taps - 1 if left is None else left
        out = length if out is None else out
        self.right = out - length - self.left + taps - 1
        self.x, self.grad = rows(length), rows(out)
        self.weight = (torch.randn(channels, 1, taps, device=device, dtype=torch.float64) / taps**0.5).to(dtype)
        self.bias = torch.randn(channels, device=device, dtype=torch.float64).to(dtype) if bias else None
        self.shift, self.silu, self.channels_last = shift, silu, channels_last

    def forward(self):
        return ops.causal_conv1d(self.x, self.weight, self.bias, self.left, self.right, self.shift, self.silu, self.channels_last)

    def backward(self, *needed):
        return ops.causal_conv1d_backward(
            self.grad,
            self.x,
            self.weight,
            self.bias,
            self.left,
            self.shift,
            self.silu,
            self.channels_last,
            *(needed or (True,) * 3),
        )

    def ours(self):
        return self.forward(), *self.backward(True, True, self.bias is not None)[: 3 if self.bias is not None else 2]

    def torchs(self, dtype=torch.float64):
        leaves = [t.detach().to(dtype).contiguous().requires_grad_() for t in (self.x, self.weight, self.bias) if t is not None]
        padded_right = max(self.right, 0)
        bias = leaves[2] if self.bias is not None else None
        y = family.reference(leaves[0], leaves[1], bias, self.left, padded_right, self.shift, self.silu)[..., : self.grad.shape[2]]
        return y.detach(), *torch.autograd.grad(y, leaves, self.grad.to(dtype))

    def check(self):
        for name, got, want in zip(("out", "dx", "dw", "db"), self.ours(), self.torchs()):
            assert got.shape == want.shape
            # A sum of random gradients may happen to be near zero; its error is measured against what was summed.
            scale = max(want.norm(), self.grad.double().norm()) if name in ("dw", "db") else want.norm().clamp_min(1e-6)
            error = (got.double() - want).norm() / scale
            assert error < TOLERANCE[self.x.dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 31, 64, 129, 768, 1134])
def test_short_kernels(device, dtype, channels_last, length):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is for the CPU")
    for channels, taps, silu in ((8, 4, True), (5, 4, False), (16, 3, True), (1, 2, False)):
        Case(2, channels, length, taps, dtype, device, channels_last=channels_last, silu=silu).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length, taps", [(64, 64), (129, 129), (768, 768), (700, 31), (500, 128), (60, 200), (1, 300), (1025, 513)])
def test_long_kernels(device, dtype, length, taps):
    for batch, channels, silu in ((1, 2, False), (3, 3, True), (9, 1, False), (17, 2, False)):
        Case(batch, channels, length, taps, dtype, device, silu=silu, bias=batch != 3).check()


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_thousands(dtype):
    Case(2, 2, 8192, 8192, dtype, "cuda").check()
    Case(3, 2, 5000, 4999, dtype, "cuda", silu=True).check()
    Case(4, 2, 20000, 7, dtype, "cuda").check()


@pytest.mark.parametrize("device", DEVICES)
def test_five_hundred_random_convolutions(device):
    draw = random.Random(1)
    for _ in range(500):
        length = draw.choice([1, 2, draw.randint(1, 40), draw.randint(1, 300), draw.randint(300, 700)])
        taps = draw.choice([1, 2, 3, 4, 4, draw.randint(5, 64), draw.randint(65, 500), length])
        left = draw.choice([taps - 1, taps - 1, 0, draw.randint(0, taps + 3)])
        # Outputs that meet no sample at all have a gradient of rounding errors: none here.
        out = draw.choice([length, max(1, length - taps + 1), draw.randint(max(1, length // 2), length + left)])
        dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16] + [torch.float64] * (device == "cpu"))
        case = Case(
            draw.choice([1, 2, 8, 11]), draw.choice([1, 3, 8, 40]), length, taps, dtype, device,
            channels_last=draw.random() < 0.5, left=left, out=out, silu=draw.random() < 0.5,
        )  # fmt: skip
        # Never worse than 1.2 times eager in the same dtype, plus a rounding.
        for got, want, eager in zip(case.ours(), case.torchs(), case.torchs(dtype)):
            scale = max(want.norm(), case.grad.double().norm())
            error, eagers = ((t.double() - want).norm() / scale for t in (got, eager))
            assert error <= 1.2 * eagers + TOLERANCE[dtype] / 8, (length, taps, left, out, dtype)


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
def test_repetition_is_bit_identical(device, length, taps, channels_last):
    case = Case(6, 40, length, taps, torch.float32, device, channels_last=channels_last, silu=True)
    first = case.ours()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, case.ours()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [4, 20, 200])
def test_only_the_outputs_that_see_an_infinity_are_spoilt(device, taps):
    case = Case(4, 3, 300, taps, torch.float32, device)
    case.x[1, 2, 150] = float("inf")
    case.x[2, 1, 299] = float("nan")
    spoilt = ~torch.isfinite(case.forward())
    expected = torch.zeros_like(spoilt)
    expected[1, 2, 150 : 150 + taps] = True
    expected[2, 1, 299:] = True
    assert torch.equal(spoilt, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_slices_misaligned_rows_and_reversed_weights(device, channels_last):
    for taps in (4, 9, 70):
        case = Case(3, 16, 200, taps, torch.float32, device, channels_last=channels_last)
        whole = torch.randn(3, 40, 203, device=device)
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else whole
        case.x = whole[:, 11:27, 3:]
        case.weight = torch.randn(16, 1, 2 * taps, device=device)[..., ::2]
        case.grad = torch.randn(3, 1, 1, device=device).expand(3, 16, 200)
        case.check()


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_gradients_are_computed(device):
    for taps in (4, 40):
        case = Case(2, 8, 64, taps, torch.float32, device, silu=True)
        whole = case.backward()
        for needed in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
            for want, got, full in zip(needed, case.backward(*needed), whole):
                assert torch.equal(got, full) if want else got.numel() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_empty_tensors(device):
    for shape in ((0, 4, 16), (2, 0, 16), (2, 4, 0)):
        x, weight = torch.randn(shape, device=device), torch.randn(shape[1], 1, 3, device=device)
        y = ops.causal_conv1d(x, weight, None, 2, 0, 0.0, False, False)
        assert y.shape == shape
        dx, dw, db = ops.causal_conv1d_backward(y, x, weight, None, 2, 0.0, False, False, True, True, True)
        assert dx.shape == shape and not dw.any() and not db.any()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
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


def test_operands_that_do_not_fit_are_refused():
    x, weight = torch.randn(2, 4, 8), torch.randn(4, 1, 3)
    for arguments, words in (
        ((x, torch.randn(5, 1, 3), None, 2, 0), "weight must be"),
        ((x, weight.double(), None, 2, 0), "dtype and device"),
        ((x, weight, torch.randn(3), 2, 0), "bias must be"),
        ((x[0], weight, None, 2, 0), "batch, channels, time"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ops.causal_conv1d(*arguments, 0.0, False, False)
