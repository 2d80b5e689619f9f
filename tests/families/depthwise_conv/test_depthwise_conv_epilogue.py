"""What follows a depthwise convolution and is computed with it: which graphs are found, which are left, and the kernels against fp64."""

from __future__ import annotations

import functools
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families.channel_epilogues import DTYPES, NAMES, TOLERANCE, absorbed_by, check_generated_code, check_training, draw_statistics

import fusebackend
from fusebackend.backend import fuse
from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d.channel_reference import ACTIVATIONS
from fusebackend.patterns.depthwise_conv.ops import depthwise_conv, reference

ops = torch.ops.fusebackend
C = 16


# ---- graphs ----


@pytest.fixture
def absorbed(on_each_device):
    return functools.partial(absorbed_by, "depthwise_conv")


class Block(torch.nn.Module):
    """A depthwise convolution, batch norm with statistics of its own, and an activation."""

    def __init__(self, activation=F.silu, *, bias=False, affine=True, channels_last=False, taps=3):
        super().__init__()
        self.conv = torch.nn.Conv2d(C, C, taps, padding=taps // 2, groups=C, bias=bias)
        self.norm = torch.nn.BatchNorm2d(C, affine=affine)
        draw_statistics(self.norm)
        self.activation = activation
        self.eval()

    def forward(self, x):
        return self.activation(self.norm(self.conv(x)))


def image(channels_last=False, batch=2):
    x = torch.randn(batch, C, 9, 10)
    return x.to(memory_format=torch.channels_last) if channels_last else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_batch_norm_and_each_activation(name, dtype, absorbed):
    for channels_last in (False, True):
        assert absorbed(Block(ACTIVATIONS[name]), image(channels_last), dtype=dtype) == [f"absorbs batch norm and {NAMES[name]}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_alone(name, dtype, absorbed):
    def fn(x, w, b):
        return ACTIVATIONS[name](F.conv2d(x, w, b, padding=1, groups=C))

    args = image(), torch.randn(C, 1, 3, 3), torch.randn(C)
    assert absorbed(fn, *args, dtype=dtype) == [f"absorbs {NAMES[name]}"]


@pytest.mark.parametrize("more", [dict(bias=True), dict(affine=False), dict(taps=5)])
def test_forms_of_batch_norm(more, absorbed):
    assert absorbed(Block(torch.nn.Identity(), **more), image()) == ["absorbs batch norm"]
    assert absorbed(Block(**more), image(), dtype=torch.bfloat16) == ["absorbs batch norm and SiLU"]


def test_batch_norm_in_fp32_of_a_16_bit_convolution(absorbed):
    """As under autocast."""
    block = Block()

    def fn(x, w, *norm):
        return F.silu(F.batch_norm(F.conv2d(x.bfloat16(), w.bfloat16(), None, 1, 1, 1, C), *norm))

    norm = [t.detach() for t in (block.norm.running_mean, block.norm.running_var, block.norm.weight, block.norm.bias)]
    torch.compiler.reset()
    x, w = image(), torch.randn(C, 1, 3, 3)
    options = {"fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True, "fuse.patterns": "depthwise_conv"}
    got = torch.compile(fn, backend=fuse, options=options)(x, w, *norm)
    assert [s.note for s in fusebackend.last_report().substitutions] == ["absorbs batch norm and SiLU"]
    exact = F.silu(F.batch_norm(F.conv2d(x.bfloat16().double(), w.bfloat16().double(), None, 1, 1, 1, C), *(n.double() for n in norm)))
    assert got.dtype == torch.bfloat16 and (got.double() - exact).abs().max() <= TOLERANCE[torch.bfloat16] * exact.abs().max()


def test_a_scale_and_a_shift_of_each_channel(absorbed):
    def frozen(x, w, scale, shift):
        return F.relu(F.conv2d(x, w, None, 1, 1, 1, C) * scale[:, None, None] + shift.view(1, -1, 1, 1))

    def shifted(x, w, shift):
        return F.conv2d(x, w, None, 1, 1, 1, C) + shift[:, None, None]

    x, w, v = image(), torch.randn(C, 1, 3, 3), torch.randn(C)
    for dtype in (torch.float32, torch.bfloat16):
        assert absorbed(frozen, x, w, v, v.flip(0), dtype=dtype) == ["absorbs a scale or shift and ReLU"]
        assert absorbed(shifted, x, w, v, dtype=dtype) == ["absorbs a scale or shift"]


def test_other_spellings_of_activations(absorbed):
    def hardswish(x, w):
        y = F.conv2d(x, w, None, 1, 1, 1, C)
        return y * F.hardsigmoid(y)

    def gelu(x, w):
        y = F.conv2d(x, w, None, 1, 1, 1, C)
        return 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * torch.pow(y, 3))))

    def clamped(x, w):
        return F.conv2d(x, w, None, 1, 1, 1, C).clamp(0, 6)

    def at_least(x, w):
        return F.conv2d(x, w, None, 1, 1, 1, C).clamp(min=0)

    args = image(), torch.randn(C, 1, 3, 3)
    for fn, note in ((hardswish, "hardswish"), (gelu, "GELU"), (clamped, "ReLU6"), (at_least, "ReLU")):
        assert absorbed(fn, *args) == [f"absorbs {note}"], fn.__name__


def test_a_strided_conv1d(absorbed):
    def fn(x, w, scale):
        return F.silu(F.conv1d(x, w, None, 2, 1, 1, C) * scale[:, None])

    assert absorbed(fn, torch.randn(2, C, 31), torch.randn(C, 1, 3), torch.randn(C)) == ["absorbs a scale or shift and SiLU"]


def test_symbolic_sizes(absorbed):
    assert absorbed(Block(), image(), dynamic=True) == ["absorbs batch norm and SiLU"]


def test_what_is_needed_in_between_stays(absorbed):
    def kept(x, w, v):
        y = F.conv2d(x, w, None, 1, 1, 1, C)
        return F.silu(y) + y * v[:, None, None]

    def normed(x, w, v):
        y = F.conv2d(x, w, None, 1, 1, 1, C) * v[:, None, None]
        return F.silu(y) + y

    x, w, v = image(), torch.randn(C, 1, 3, 3), torch.randn(C)
    assert absorbed(kept, x, w, v) == [""]
    assert absorbed(normed, x, w, v) == ["absorbs a scale or shift"]


def test_what_is_no_epilogue(absorbed):
    def fn_of(after):
        return lambda x, w, v: after(F.conv2d(x, w, None, 1, 1, 1, C), v)

    x, w, v = image(), torch.randn(C, 1, 3, 3), torch.randn(C)
    for after in (
        lambda y, v: y * v[:10],  # of columns
        lambda y, v: v[:, None, None] - y,
        lambda y, v: torch.add(y, v[:, None, None], alpha=2),
        lambda y, v: F.leaky_relu(y),
        lambda y, v: y.clamp(0, 5),
        lambda y, v: y.clamp(-1, 6),
        lambda y, v: y * torch.clamp(y + 3, 0, 6) / 5,
        lambda y, v: y * 0.5 * (1 + torch.erf(y * 0.7)),
        lambda y, v: y * y.mean((2, 3), keepdim=True),
    ):
        assert absorbed(fn_of(after), x, w, v) == [""]


def test_an_order_that_rounding_would_tell_apart_is_kept(absorbed):
    """A shift before batch norm: what stands in another order than the operator's is left behind it."""

    def fn(x, w, a, b):
        return (F.conv2d(x, w, None, 1, 1, 1, C) + a[:, None, None]) * b[:, None, None]

    assert absorbed(fn, image(), torch.randn(C, 1, 3, 3), torch.randn(C), torch.randn(C)) == ["absorbs a scale or shift"]


def test_training_keeps_what_its_backward_needs(on_each_device):
    check_training("depthwise_conv", Block(), image().requires_grad_())


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code(dtype):
    model, x = torch.nn.Sequential(Block(), torch.nn.Conv2d(C, 8, 1)).eval().to(dtype), image().to(dtype)
    check_generated_code(model, x)


# ---- kernels ----


@pytest.fixture
def has_kernels(device):
    reason = loader.load().why_not(device)
    if reason:
        pytest.skip(reason)


# One for each kernel: rolling_band of pairs and of single columns, channel_band, rolling_window in both orders and strided, toeplitz, tiles
# of fp32, loops; and the CPU's.
FORMS = {
    "3x3": ((3, 16, 17, 28), 3, 1),
    "3x3 odd": ((2, 24, 9, 13), 3, 1),
    "5x5": ((2, 16, 14, 14), 5, 1),
    "7x7": ((2, 24, 28, 28), 7, 1),
    "7x7 odd": ((9, 33, 7, 7), 7, 1),
    "9x9": ((1, 3, 20, 30), 9, 1),
    "20x20": ((1, 8, 30, 40), 20, 1),
    "3x3 stride 2": ((3, 16, 28, 28), 3, 2),
    "5x5 stride 2 odd": ((2, 8, 15, 33), 5, 2),
    "3x3 stride 3": ((2, 8, 20, 20), 3, 3),
    "wide": ((1, 8, 6, 300), 5, 1),
}


class Case:
    """Random operands of one convolution with an epilogue."""

    def __init__(
        self, shape, taps, stride, dtype, device, activation, channels_last=False, vectors=(True,) * 4, wide=True, multiplier=1, bias=True
    ):
        outputs = shape[1] * multiplier
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(shape, device=device).to(dtype)
        self.x = x.to(memory_format=torch.channels_last) if channels_last else x
        self.weight = (torch.randn(outputs, 1, taps, taps, device=device) / taps).to(dtype)
        self.bias = torch.randn(outputs, device=device).to(dtype) if bias else None
        of = [torch.randn(outputs, device=device).to(sums if wide else dtype) if v else None for v in vectors]
        if of[1] is not None:
            of[1] = of[1].abs() + 0.25
        self.after = (*of, 1e-3, activation)
        self.numbers = [stride] * 2, [taps // 2] * 4, [1, 1]

    def ours(self, order=None):
        return ops.depthwise_conv(self.x, self.weight, self.bias, *self.numbers, order, *self.after)

    def torchs(self, dtype=torch.float64):
        def cast(t):
            return t.to(dtype) if isinstance(t, torch.Tensor) else t

        with torch.backends.cudnn.flags(enabled=dtype != torch.float64):
            after = self.after if dtype == self.x.dtype else map(cast, self.after)
            return reference(*map(cast, (self.x, self.weight, self.bias)), *self.numbers, *after)

    def check(self, order=None):
        got, want = self.ours(order), self.torchs()
        assert got.shape == want.shape and got.dtype == self.x.dtype
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= TOLERANCE[got.dtype], f"{error:.1e}"


@pytest.mark.usefixtures("has_kernels")
class TestKernels:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("form", FORMS)
    def test_each_form_with_each_activation(self, form, dtype, device):
        for activation, channels_last in itertools.product(("", *ACTIVATIONS), (False, True)):
            Case(*FORMS[form], dtype, device, activation, channels_last).check()

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_large_channels_last_images(self, dtype):
        """Those whose rows wait in shared memory."""
        for activation in ("", *ACTIVATIONS):
            Case((220, 40, 56, 41), 3, 1, dtype, "cuda", activation, channels_last=True).check()
        Case((220, 40, 56, 41), 3, 1, dtype, "cuda", "silu", True, (False,) * 4, bias=False).check()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_vector_alone_and_in_each_type(self, dtype, device):
        for vectors, wide, channels_last in itertools.product(itertools.product((False, True), repeat=4), (False, True), (False, True)):
            Case((2, 16, 9, 14), 3, 1, dtype, device, "silu", channels_last, vectors, wide, bias=wide).check()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_orders_and_several_outputs_a_channel(self, dtype, device):
        for multiplier, channels_last, order in itertools.product((1, 2), (False, True), (None, False, True)):
            Case((2, 8, 12, 14), 5, 1, dtype, device, "gelu", channels_last, multiplier=multiplier).check(order)

    def test_float64_on_cpus(self):
        for activation, channels_last in itertools.product(("", *ACTIVATIONS), (False, True)):
            Case((2, 8, 12, 14), 3, 2, torch.float64, "cpu", activation, channels_last).check()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_errors_are_no_larger_than_eagers(self, dtype, device):
        draw = random.Random(0)
        for activation in ("", *ACTIVATIONS):
            case = Case((4, 24, 28, 28), draw.choice((3, 5, 7)), draw.choice((1, 2)), dtype, device, activation, draw.random() < 0.5)
            exact = case.torchs()
            ours, eager = ((t.double() - exact).norm().item() for t in (case.ours(), case.torchs(dtype)))
            assert ours <= 1.2 * eager + 1e-7 * exact.norm(), activation

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_what_is_not_finite_reaches_what_it_reaches_in_eager(self, dtype, channels_last, device):
        """An activation may make an infinity finite: kernels that look at results for what to compute again must not rely on these."""
        inf, nan = float("inf"), float("nan")
        for (taps, stride), activation in itertools.product(((3, 1), (5, 1), (7, 1), (5, 2), (9, 1)), ("", *ACTIVATIONS)):
            case = Case((2, 16, 17, 20), taps, stride, dtype, device, activation, channels_last)
            case.x, case.weight = (case.x.abs() + 0.1), (case.weight.abs() + 0.01)
            case.x[1, 3, 5, 7], case.x[0, 9, 16, 19], case.x[0, 5, 0, 0] = inf, nan, -inf
            case.weight[4, 0, 0, 0], case.weight[12, 0, -1, 1] = -inf, nan
            case.numbers[1][:] = [0] * 4  # the reference would multiply the padding
            got, want = case.ours().double(), case.torchs()
            assert torch.equal(got.isnan(), want.isnan()), (taps, stride, activation)
            assert torch.equal(got.isinf(), want.isinf()), (taps, stride, activation)
            finite = want.isfinite()
            torch.testing.assert_close(got[finite], want[finite], rtol=2e-2, atol=2e-2)

    def test_a_variance_of_zero_without_eps_divides_by_zero(self, device):
        """(sum - mean) * inf: an infinity of its sign, NaN where they are equal. Folded constants would make inf - inf of it."""
        x = torch.tensor([3.0, 1.0, 2.0], device=device).view(3, 1, 1, 1)
        one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
        y = ops.depthwise_conv(x, one.view(1, 1, 1, 1), None, [1, 1], [0] * 4, [1, 1], None, 2 * one, zero, one, one, 0.0, "")
        torch.testing.assert_close(y.flatten(), torch.tensor([float("inf"), float("-inf"), float("nan")], device=device), equal_nan=True)

    @pytest.mark.parametrize("form", ["3x3", "7x7", "3x3 stride 2", "9x9"])
    def test_the_same_bits_every_time(self, form, device):
        for dtype, channels_last in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            case = Case(*FORMS[form], dtype, device, "silu", channels_last)
            assert torch.equal(case.ours(), case.ours())

    def test_what_is_refused(self, device):
        case = Case((2, 8, 9, 9), 3, 1, torch.bfloat16, device, "silu")
        mean, variance, scale, shift, eps, _ = case.after
        meta = [t.to("meta") for t in (case.x, case.weight)]
        for after, reason in (
            ((mean, variance, scale, shift, eps, "tanh"), "activation tanh is not supported"),
            ((mean[:4], None, None, None, eps, ""), "mean must be"),
            ((None, variance.half(), None, None, eps, ""), "variance must"),
            ((None, None, scale.double(), None, eps, ""), "scale must"),
        ):
            with pytest.raises(RuntimeError, match=reason):
                ops.depthwise_conv(case.x, case.weight, None, *case.numbers, None, *after)
            with pytest.raises(RuntimeError, match=reason):
                ops.depthwise_conv(*meta, None, *case.numbers, None, *(t.to("meta") if isinstance(t, torch.Tensor) else t for t in after))

    def test_the_fake_agrees(self, device):
        for channels_last in (False, True):
            case = Case((2, 8, 9, 10), 3, 1, torch.bfloat16, device, "gelu", channels_last, wide=False)
            torch.library.opcheck(depthwise_conv, (case.x, case.weight, case.bias, *case.numbers, None, *case.after))


def test_avx2_kernels_match_fp64():
    """Selected by PyTorch's variable, also on processors with AVX-512."""
    code = """
import fusebackend
from test_depthwise_conv_epilogue import ACTIVATIONS, DTYPES, Case
fusebackend.load_operators()
for dtype in DTYPES:
    for activation in ACTIVATIONS:
        for channels_last in (False, True):
            Case((2, 24, 17, 28), 3, 1, dtype, "cpu", activation, channels_last).check()
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
