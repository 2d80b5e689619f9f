"""What follows a convolution along time and is computed with it: which graphs are found, which are left, and the kernels against fp64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from families.channel_epilogues import DTYPES, NAMES, TOLERANCE, absorbed_by, check_generated_code, check_training, draw_statistics
from families.traced_graphs import estimates, traced_joint

from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d import operator_work
from fusebackend.patterns.causal_conv1d.channel_reference import ACTIVATIONS
from fusebackend.patterns.causal_conv1d.match import CausalConv1d
from fusebackend.patterns.causal_conv1d.ops import causal_conv1d, reference
from fusebackend.rewriting import device_facts

ops = torch.ops.fusebackend
C = 16


# ---- graphs ----


@pytest.fixture
def absorbed(on_each_device):
    return functools.partial(absorbed_by, "causal_conv1d")


class Block(torch.nn.Module):
    """The middle of a Conformer's convolution module: a depthwise convolution, batch norm with statistics of its own, an activation."""

    def __init__(self, activation=F.silu, *, taps=31, bias=False, affine=True, causal=False, btc=False):
        super().__init__()
        self.conv = torch.nn.Conv1d(C, C, taps, padding=0 if causal else taps // 2, groups=C, bias=bias)
        self.norm = torch.nn.BatchNorm1d(C, affine=affine)
        draw_statistics(self.norm)
        self.activation, self.causal, self.btc = activation, causal, btc
        self.eval()

    def forward(self, x):
        x = x.transpose(1, 2) if self.btc else x
        x = F.pad(x, (self.conv.kernel_size[0] - 1, 0)) if self.causal else x
        y = self.activation(self.norm(self.conv(x)))
        return y.transpose(1, 2) if self.btc else y


def rows(length=40):
    return torch.randn(2, C, length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_batch_norm_and_each_activation(name, dtype, absorbed):
    assert absorbed(Block(ACTIVATIONS[name]), rows(), dtype=dtype) == [f"absorbs batch norm and {NAMES[name]}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_alone(name, dtype, absorbed):
    def fn(x, w, b):
        return ACTIVATIONS[name](F.conv1d(x, w, b, padding=2, groups=C))

    assert absorbed(fn, rows(), torch.randn(C, 1, 5), torch.randn(C), dtype=dtype) == [f"absorbs {NAMES[name]}"]


@pytest.mark.parametrize("more", [dict(bias=True), dict(affine=False), dict(taps=4, causal=True), dict(taps=9, btc=True), dict(btc=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_of_batch_norm(more, dtype, absorbed):
    x = rows().transpose(1, 2).contiguous() if more.get("btc") else rows()
    assert absorbed(Block(torch.nn.Identity(), **more), x, dtype=dtype) == ["absorbs batch norm"]
    assert absorbed(Block(**more), x, dtype=dtype) == ["absorbs batch norm and SiLU"]


def test_batch_norm_written_out_behind_a_slice_and_a_constant(absorbed):
    def fn(x, w, mean, variance, scale, shift):
        y = F.conv1d(x, w, None, padding=3, groups=C)[..., : x.shape[2]] + 0.5
        y = (y - mean[:, None]) * torch.rsqrt(variance.abs() + 1e-3)[:, None]
        return F.gelu(y * scale[:, None] + shift.view(1, -1, 1))

    vectors = [torch.randn(C) for _ in range(4)]
    assert absorbed(fn, rows(), torch.randn(C, 1, 4), *vectors) == ["absorbs batch norm and GELU and constant"]


def test_symbolic_sizes(absorbed):
    assert absorbed(Block(), rows(), dynamic=True) == ["absorbs batch norm and SiLU"]


def test_what_is_needed_in_between_stays(absorbed):
    def kept(x, w, v):
        y = F.conv1d(x, w, None, 1, 1, 1, C)
        return F.silu(y * v[:, None]) + y.cos()

    def normed(x, w, v):
        y = F.conv1d(x, w, None, 1, 1, 1, C) * v[:, None]
        return F.silu(y) + y

    def along_time(x, w, v):
        return F.conv1d(x, w, None, 1, 1, 1, C) * torch.cat([v, v, v])[: x.shape[2]]

    x, w, v = rows(), torch.randn(C, 1, 3), torch.randn(C)
    assert absorbed(kept, x, w, v) == [""]
    assert absorbed(normed, x, w, v) == ["absorbs a scale or shift"]
    assert absorbed(along_time, x, w, v) == [""]


def test_channels_that_are_last_after_a_permutation_are_no_rows(absorbed):
    """(batch, time, channels) before the slice: a vector of as many numbers as samples is none of channels."""

    def fn(x, w, v):
        y = F.conv1d(x, w, None, padding=3, groups=C).transpose(1, 2)[:, :C]
        return F.silu(y * v[:, None])

    assert absorbed(fn, rows(C), torch.randn(C, 1, 4), torch.randn(C)) == [""]


def test_training_keeps_what_its_backward_needs(on_each_device):
    check_training("causal_conv1d", Block(), rows().requires_grad_())


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code(dtype):
    model, x = torch.nn.Sequential(Block(), torch.nn.Conv1d(C, 8, 1)).eval().to(dtype), rows().to(dtype)
    check_generated_code(model, x)


# ---- estimates ----


@pytest.fixture
def h200(library, monkeypatch):
    monkeypatch.setattr(type(loader.load()), "why_not", lambda self, device, *operators: None)
    monkeypatch.setattr(operator_work, "device_facts", lambda device: device_facts.IMAGINED)


@pytest.mark.parametrize(
    "taps, samples, route", [(31, 1000, "tensor_cores"), (4, 1000, "window"), (31, 999, "tensor_cores"), (100, 1000, "")]
)
def test_the_work_of_both_ways(h200, taps, samples, route):
    """What absorbs it is described by the kernels that can. Leaving it to Inductor is offered where another kernel would convolve then."""

    def fn(x, w, mean, variance, scale, shift):
        return F.silu(F.batch_norm(F.conv1d(F.pad(x, (taps - 1, 0)), w, None, groups=512), mean, variance, scale, shift))

    args = [torch.empty(32, 512, samples), torch.empty(512, 1, taps), *(torch.empty(512) for _ in range(4))]
    (found,) = estimates(traced_joint(fn, [a.bfloat16() for a in args]), (CausalConv1d(),))
    whole, *plain = found
    (ours,), (theirs,) = whole.ours, whole.inductor
    assert {name for name in ("short", "window", "tensor_cores", "fft") if ours.shape[name]} == ({route} if route else set())
    elements = 32 * 512 * samples
    assert ours.quantities["activations"] == elements and ours.quantities["pointwise bytes"] == 0
    assert theirs.quantities["launches"] == 3 and theirs.shape["silu"] == 1
    assert len(plain) == (taps in (4, 100))
    for workload in plain:
        (conv,) = workload.ours
        assert conv.quantities["pointwise bytes"] == 2 * 2 * elements and conv.quantities["activations"] == 0
        assert workload.match.site.after is None


# ---- kernels ----


@pytest.fixture
def has_kernels(device):
    reason = loader.load().why_not(device)
    if reason:
        pytest.skip(reason)


# batch, channels, samples, taps: registers of few taps and of tens, aligned or not; tensor cores; tiles; many channels as lanes.
FORMS = {
    "4 taps": (2, 24, 200, 4),
    "9 taps": (3, 17, 128, 9),
    "31 taps": (9, 16, 104, 31),
    "31 taps odd": (9, 17, 103, 31),
    "31 taps few rows": (2, 33, 640, 31),
    "40 taps": (6, 8, 96, 40),
    "100 taps": (2, 16, 128, 100),
    "one channel": (3, 1, 50, 5),
    "long": (1, 40, 3000, 7),
}


class Case:
    """Random operands of one convolution with an epilogue."""

    def __init__(self, batch, channels, length, taps, dtype, device, activation, btc=False, vectors=(True,) * 4, wide=True, bias=True):
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.x = torch.randn(batch, length, channels, device=device).to(dtype).transpose(1, 2) if btc else None
        self.x = torch.randn(batch, channels, length, device=device).to(dtype) if self.x is None else self.x
        self.weight = (torch.randn(channels, 1, taps, device=device) / taps**0.5).to(dtype)
        self.bias = torch.randn(channels, device=device).to(dtype) if bias else None
        of = [torch.randn(channels, device=device).to(sums if wide else dtype) if v else None for v in vectors]
        if of[1] is not None:
            of[1] = of[1].abs() + 0.25
        self.after = (*of, 1e-3, activation)
        self.numbers = taps // 2, taps - 1 - taps // 2, 0.25
        self.btc = btc

    def ours(self, btc=None):
        return ops.causal_conv1d(self.x, self.weight, self.bias, *self.numbers, False, self.btc if btc is None else btc, *self.after)

    def torchs(self, dtype=torch.float64):
        def cast(t):
            return t.to(dtype) if isinstance(t, torch.Tensor) else t

        with torch.backends.cudnn.flags(enabled=dtype != torch.float64):
            after = self.after if dtype == self.x.dtype else map(cast, self.after)
            return reference(*map(cast, (self.x, self.weight, self.bias)), *self.numbers, False, *after)

    def check(self, btc=None):
        got, want = self.ours(btc), self.torchs()
        assert got.shape == want.shape and got.dtype == self.x.dtype
        error, largest = (got.double() - want).abs().max(), want.abs().max()  # a rectifier may leave zeros only
        assert error <= TOLERANCE[got.dtype] * largest, f"{error:.1e} of {largest:.1e}"


@pytest.mark.usefixtures("has_kernels")
class TestKernels:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("form", FORMS)
    def test_each_form_with_each_activation(self, form, dtype, device):
        for activation, btc, order in itertools.product(("", *ACTIVATIONS), (False, True), (False, True)):
            Case(*FORMS[form], dtype, device, activation, btc).check(order)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_vector_alone_and_in_each_type(self, dtype, device):
        for vectors, wide, btc in itertools.product(itertools.product((False, True), repeat=4), (False, True), (False, True)):
            for form in ((5, 8, 40, 31), (2, 16, 50, 3)):
                Case(*form, dtype, device, "silu", btc, vectors, wide, bias=wide).check()

    def test_float64_on_cpus(self):
        for activation, btc in itertools.product(("", *ACTIVATIONS), (False, True)):
            Case(2, 33, 50, 5, torch.float64, "cpu", activation, btc).check()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("form", ["4 taps", "31 taps", "31 taps odd", "long"])
    def test_errors_are_no_larger_than_eagers(self, form, dtype, device):
        for activation, btc in itertools.product(("", *ACTIVATIONS), (False, True)):
            case = Case(*FORMS[form], dtype, device, activation, btc)
            exact = case.torchs()
            ours, eager = ((t.double() - exact).norm().item() for t in (case.ours(), case.torchs(dtype)))
            assert ours <= 1.2 * eager + 1e-7 * exact.norm(), activation

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("form", ["4 taps", "31 taps", "31 taps odd", "100 taps"])
    def test_what_is_not_finite_reaches_what_it_reaches_in_eager(self, form, dtype, device):
        """An activation may make an infinity finite: kernels that look at results for what to compute again must not rely on these."""
        inf, nan = float("inf"), float("nan")
        for activation, btc in itertools.product(("", *ACTIVATIONS), (False, True)):
            case = Case(*FORMS[form], dtype, device, activation, btc)
            case.x, case.weight = case.x.abs() + 0.1, case.weight.abs() + 0.01
            case.x[1, 3, 5], case.x[0, 9, -1], case.x[0, 5, 0] = inf, nan, -inf
            case.weight[12, 0, 1] = nan
            got, want = case.ours().double(), case.torchs()
            assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()), activation
            finite = want.isfinite()
            torch.testing.assert_close(got[finite], want[finite], rtol=2e-2, atol=2e-2)

    def test_the_same_bits_every_time(self, device):
        for form, dtype in itertools.product(FORMS.values(), DTYPES):
            case = Case(*form, dtype, device, "silu")
            assert torch.equal(case.ours(), case.ours())

    def test_a_strided_slice_of_channels_and_samples(self, device):
        for dtype in DTYPES:
            case = Case(6, 40, 131, 31, dtype, device, "silu")
            case.x = case.x[:, :, 1:122]
            case.check()

    def test_what_is_refused(self, device):
        case = Case(2, 8, 9, 3, torch.bfloat16, device, "silu")
        mean, variance, scale, offset, eps, _ = case.after
        for silu, after, reason in (
            (False, (mean, variance, scale, offset, eps, "tanh"), "activation tanh is not supported"),
            (False, (mean[:4], None, None, None, eps, ""), "mean must be"),
            (False, (None, variance.half(), None, None, eps, ""), "variance must"),
            (False, (None, None, scale.double(), None, eps, ""), "scale must"),
            (False, (None, None, None, offset[:, None], eps, ""), "offset must be"),
            (True, (mean, None, None, None, eps, ""), "SiLU and another epilogue"),
            (True, (None, None, None, None, eps, "gelu"), "SiLU and another epilogue"),
        ):
            for place in (device, "meta"):
                args = [t.to(place) if isinstance(t, torch.Tensor) else t for t in (case.x, case.weight, None, *case.numbers, silu, False)]
                with pytest.raises(RuntimeError, match=reason):
                    ops.causal_conv1d(*args, *(t.to(place) if isinstance(t, torch.Tensor) else t for t in after))

    def test_the_fake_agrees(self, device):
        for btc in (False, True):
            case = Case(2, 8, 20, 3, torch.bfloat16, device, "gelu", btc, wide=False)
            args = (case.x, case.weight, case.bias, *case.numbers, False, btc, *case.after)
            torch.library.opcheck(causal_conv1d, args)
