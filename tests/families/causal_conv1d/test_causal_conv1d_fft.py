"""Convolutions that are written by FFT: which are found, that values and gradients are right, and what is left to Inductor and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fft import fft, ifft, irfft, rfft

import fusebackend
from fusebackend.backend import fuse

BATCH, CHANNELS, LENGTH = 3, 5, 24
FORWARD, BACKWARD = "fft_conv1d", "fft_conv1d_backward"
#: Besides eager's own error: of one rounding.
ROUNDING = 2.0**-23

pytestmark = pytest.mark.usefixtures("on_each_device")


def compiled(fn, **options):
    torch._dynamo.reset()  # sizes are to stay numbers
    dynamic = options.pop("dynamic", None)
    chosen = {"fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True, "fuse.patterns": [FORWARD, BACKWARD], **options}
    return torch.compile(fn, backend=fuse, dynamic=dynamic, options=chosen)


def with_gradients(fn, args, grad=None):
    y = fn(*args)
    leaves = [a for a in args if a.requires_grad]
    grad = torch.randn_like(y) if grad is None else grad.to(y.dtype)
    return [y, *(torch.autograd.grad(y, leaves, grad) if leaves else ())], grad


def compare(fn, *args, strides=True, **options):
    """Runs ``fn`` and its gradients compiled. Errors to fp64 must not exceed eager's. Returns the report."""
    eager, grad = with_gradients(fn, args)
    wide = [a.detach().double().requires_grad_(a.requires_grad) for a in args]
    exact, _ = with_gradients(fn, wide, grad)
    got, _ = with_gradients(compiled(fn, **options), args, grad)
    for a, b, want in zip(got, eager, exact):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and (a.stride() == b.stride() or not strides)
        ours, theirs = ((t.double() - want).norm() for t in (a, b))
        assert ours <= 1.2 * theirs + ROUNDING * want.norm(), f"{ours / want.norm():.1e}, eager's {theirs / want.norm():.1e}"
    return fusebackend.last_report()


def found(report):
    return sorted(s.pattern for s in report.substitutions)


def no_transform_is_left(report):
    assert not any("fft_" in graph.after for graph in report.graphs)


def u(*shape, dtype=torch.float32):
    return torch.randn(shape or (BATCH, CHANNELS, LENGTH), dtype=dtype, requires_grad=True)


def k(taps=LENGTH, *shape):
    return (torch.randn((*(shape or (CHANNELS,)), taps)) / taps**0.5).requires_grad_()


# ---- as models write them ----


def s4d(u, k, d):
    length = u.size(-1)
    y = irfft(rfft(u, n=2 * length) * rfft(k, n=2 * length), n=2 * length)[..., :length]
    return y + u * d.unsqueeze(-1)


def s4(u, k, d):
    length = u.size(-1)
    y = irfft(torch.einsum("bhl,chl->bchl", rfft(u, n=2 * length), rfft(k, n=2 * length)), n=2 * length)[..., :length]
    return F.gelu((y + torch.einsum("bhl,ch->bchl", u, d)).flatten(1, 2))


def hyena(u, k, d):
    length = u.shape[-1]
    k_f = rfft(k, n=2 * length) / (2 * length)
    u_f = rfft(u.to(dtype=k.dtype), n=2 * length)
    if u.dim() > 3:
        k_f = k_f.unsqueeze(1)
    y = irfft(u_f * k_f, n=2 * length, norm="forward")[..., :length]
    return (y + u * d.unsqueeze(-1)).to(dtype=u.dtype)


def striped_hyena(u, k):
    length = u.shape[-1]
    k_f = rfft(k, n=2 * length) / (2 * length)
    u_f = fft(u, n=2 * length)[..., : k_f.shape[-1]]
    return irfft(u_f * k_f, n=2 * length, norm="forward")[..., :length]


def mega(u, k):
    """Bidirectional: as many zeros before as k reaches back."""
    taps = k.shape[-1]
    padded = F.pad(u, (taps - 1, 0))
    n = 2 * padded.shape[-1]
    return irfft(rfft(padded, n=n) * rfft(k, n=n), n=n)[..., taps - 1 : taps - 1 + u.shape[-1]]


def of_complex(u, k):
    n = 2 * u.shape[-1]
    return ifft(fft(u, n=n) * fft(k, n=n)).real[..., : u.shape[-1]]


def along_dim_1(u, k):
    n = 2 * u.shape[1]
    return irfft(rfft(u, n=n, dim=1) * rfft(k, n=n, dim=0), n=n, dim=1)[:, : u.shape[1]]


MODELS = {
    "s4d": (s4d, lambda: (u(), k(), u(CHANNELS))),
    "s4": (s4, lambda: (u(), k(LENGTH, 1, CHANNELS), u(1, CHANNELS))),
    "s4 with two filters a channel": (s4, lambda: (u(), k(LENGTH, 2, CHANNELS), u(2, CHANNELS))),
    "hyena": (hyena, lambda: (u(), k(), u(CHANNELS))),
    "hyena with heads": (hyena, lambda: (u(BATCH, CHANNELS, 2, LENGTH), k(), u(CHANNELS, 1))),
    "striped hyena": (striped_hyena, lambda: (u(), k())),
    "mega": (mega, lambda: (u(), k(7))),
    "complex FFTs": (of_complex, lambda: (u(), k())),
    "(batch, time, channels)": (along_dim_1, lambda: (u(BATCH, LENGTH, CHANNELS), u(LENGTH, CHANNELS))),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_convolutions_of_models_are_found_forward_and_backward(name):
    fn, inputs = MODELS[name]
    report = compare(fn, *inputs())
    assert found(report) == [FORWARD, BACKWARD] and not report.rejections
    no_transform_is_left(report)


@pytest.mark.parametrize("name", MODELS)
def test_symbolic_lengths_serve_any_length(name):
    fn, inputs = MODELS[name]
    if name == "mega":
        pytest.skip("where the result begins is symbolic: see the refusals")
    # Of transforms along other dims PyTorch's fakes promise other strides than its kernels return.
    report = compare(fn, *inputs(), strides=fn is not along_dim_1, dynamic=True)
    assert found(report) == [FORWARD, BACKWARD]
    no_transform_is_left(report)


def test_one_symbolic_graph_is_compiled_for_all_lengths():
    fn = compiled(s4d, dynamic=True)
    with torch.compiler.set_stance("default"):
        for length in (24, 31, 7):
            args = u(BATCH, CHANNELS, length), k(length), u(CHANNELS)
            torch.testing.assert_close(fn(*args), s4d(*args), rtol=1e-5, atol=1e-5)
            if length == 24:
                compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles


@pytest.mark.codegen
@pytest.mark.parametrize("name", ["s4d", "hyena with heads", "complex FFTs"])
def test_generated_code_computes_the_same(name):
    fn, inputs = MODELS[name]
    assert found(compare(fn, *inputs(), **{"fuse.interpret": False})) == [FORWARD, BACKWARD]


@pytest.mark.codegen
def test_generated_code_reverses_the_taps_of_a_part_that_begins_late():
    fn = convolved(2 * LENGTH, slice(1, LENGTH))
    assert found(compare(fn, u().detach(), k().detach(), **{"fuse.interpret": False})) == [FORWARD]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows_are_convolved_in_fp32_as_they_are_transformed(dtype):
    report = compare(hyena, u(dtype=dtype), k(), u(CHANNELS))
    assert found(report) == [FORWARD, BACKWARD]


def test_16_bit_rows_that_are_converted_to_complex_numbers():
    def fn(u, k):
        n = 2 * LENGTH
        return ifft(fft(u.to(torch.complex64), n=n) * fft(k, n=n), n=n).real[..., :LENGTH]

    assert found(compare(fn, u(dtype=torch.bfloat16).detach(), k().detach())) == [FORWARD]


def test_fp64_on_cpus():
    if torch.get_default_device().type != "cpu":
        pytest.skip("CUDA kernels have no double")
    args = [a.detach().double().requires_grad_() for a in (u(), k(), u(CHANNELS))]
    exact, grad = with_gradients(s4d, args)
    got, _ = with_gradients(compiled(s4d), args, grad)
    assert all((a - b).norm() <= 1e-14 * b.norm() for a, b in zip(got, exact))
    assert found(fusebackend.last_report()) == [FORWARD, BACKWARD]


# ---- lengths, parts, scales ----


def convolved(n, part=slice(None), of=lambda s: s, **norms):
    def fn(u, k):
        forward = {"norm": norms["forward"]} if "forward" in norms else {}
        inverse = {"norm": norms["inverse"]} if "inverse" in norms else {}
        return of(irfft(rfft(u, n=n, **forward) * rfft(k, n=n, **forward), n=n, **inverse)[..., part])

    return fn


@pytest.mark.parametrize("taps", [1, 2, 9, LENGTH])
@pytest.mark.parametrize("more", [0, 1, 20])
def test_any_length_that_wraps_nothing_around(taps, more):
    fn = convolved(LENGTH + taps - 1 + more, slice(0, LENGTH))
    assert found(compare(fn, u(), k(taps))) == [FORWARD, BACKWARD]


@pytest.mark.parametrize(
    "n, taps, start, stop", [(24, 9, 8, 24), (32, 9, 0, 32), (48, 24, 3, 40), (48, 24, 24, 47), (30, 40, 10, 20), (50, 30, 2, 9)]
)
def test_any_part_that_nothing_wraps_into(n, taps, start, stop):
    length = min(LENGTH, n)
    if n + start < length + min(taps, n) - 1:
        pytest.skip("wraps")
    report = compare(convolved(n, slice(start, stop)), u(BATCH, CHANNELS, length), k(taps))
    assert found(report) == [FORWARD, BACKWARD]


def test_the_part_that_no_padding_reaches_needs_no_padding():
    """Overlap-save: where the result wraps around, it is thrown away."""
    assert found(compare(convolved(LENGTH, slice(8, LENGTH)), u(), k(9))) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("part", [slice(2 * LENGTH + 3, LENGTH), slice(3, 1), slice(5, 5)], ids=str)
def test_a_part_of_nothing(part):
    """Which may begin behind the end: the fuzzer met lengths below zero."""
    compare(convolved(2 * LENGTH, part), u().detach(), k().detach())


@pytest.mark.parametrize("forward", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("inverse", ["backward", "ortho", "forward"])
def test_norms_become_a_factor(forward, inverse):
    fn = convolved(2 * LENGTH, slice(0, LENGTH), forward=forward, inverse=inverse)
    assert found(compare(fn, u(), k())) == [FORWARD, BACKWARD]


def test_factors_that_are_written_by_hand_are_absorbed():
    def fn(u, k):
        n = 2 * LENGTH
        u_f, k_f = 3.0 * rfft(u, n=n), rfft(k, n=n) * (1 / n)
        return irfft(u_f * k_f / 2, n=n, norm="forward")[..., :LENGTH]

    report = compare(fn, u(), k())
    assert found(report) == [FORWARD, BACKWARD]
    no_transform_is_left(report)


@pytest.mark.parametrize("shape", [(1, CHANNELS), (CHANNELS,), (1, 1), (BATCH, CHANNELS)])
def test_filters_of_any_broadcastable_shape(shape):
    assert found(compare(convolved(2 * LENGTH, slice(0, LENGTH)), u(), k(LENGTH, *shape))) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("shape", [(CHANNELS, LENGTH), (1, CHANNELS, LENGTH), (2, 3, CHANNELS, LENGTH), (BATCH, 1, LENGTH)])
def test_rows_of_any_rank(shape):
    assert found(compare(convolved(2 * LENGTH, slice(0, LENGTH)), u(*shape), k())) == [FORWARD, BACKWARD]


def test_single_rows():
    assert found(compare(convolved(2 * LENGTH, slice(0, LENGTH)), u(LENGTH), k().detach()[0].requires_grad_())) == [FORWARD, BACKWARD]


def test_rows_that_are_transposed_or_padded_before():
    def fn(u, k):
        return s4d(u.transpose(1, 2), k, k[:, 0])

    def padded(u, k):
        return irfft(rfft(F.pad(u, (0, LENGTH))) * rfft(F.pad(k, (0, LENGTH))))[..., :LENGTH]

    assert found(compare(fn, u(BATCH, LENGTH, CHANNELS), k())) == [FORWARD, BACKWARD]
    report = compare(padded, u(), k())
    assert found(report) == [FORWARD, BACKWARD]
    assert all("f32[3, 5, 24]" in s.inputs and "f32[3, 5, 48]" not in s.inputs for s in report.substitutions)


def test_the_result_itself_is_returned_with_its_strides():
    report = compare(convolved(2 * LENGTH, slice(0, LENGTH)), u(), k())
    assert found(report) == [FORWARD, BACKWARD]
    y = compiled(convolved(2 * LENGTH, slice(2, LENGTH)))(u(), k())
    assert y.stride() == (CHANNELS * 2 * LENGTH, 2 * LENGTH, 1) and y.storage_offset() == 2
    y = compiled(of_complex)(u(), k())
    assert y.stride() == (CHANNELS * 4 * LENGTH, 4 * LENGTH, 2)


# ---- shared transforms ----


def test_the_transform_of_a_filter_serves_several_rows():
    def fn(a, b, k):
        n = 2 * LENGTH
        k_f = rfft(k, n=n)
        return irfft(rfft(a, n=n) * k_f, n=n)[..., :LENGTH] * torch.tanh(irfft(rfft(b, n=n) * k_f, n=n)[..., :LENGTH])

    report = compare(fn, u(), u(), k())
    assert {s.note for s in report.substitutions} == {"2 that share transforms", "3 that share transforms"}
    no_transform_is_left(report)


def test_the_transform_of_rows_serves_several_filters():
    def fn(u, a, b):
        n = 2 * LENGTH
        u_f = rfft(u, n=n)
        return irfft(u_f * rfft(a, n=n), n=n)[..., :LENGTH] * torch.tanh(irfft(u_f * rfft(b, n=n), n=n)[..., :LENGTH])

    report = compare(fn, u(), k(), k(7))
    assert found(report) == [FORWARD, BACKWARD]
    no_transform_is_left(report)


def test_a_sum_of_products_is_transformed_back_once():
    def fn(u, v, a, b):
        n = 2 * LENGTH
        return irfft(rfft(u, n=n) * rfft(a, n=n) + 0.5 * rfft(v, n=n) * rfft(b, n=n), n=n)[..., :LENGTH]

    report = compare(fn, u(), u(), k(), k(7))
    assert found(report) == [FORWARD, BACKWARD]
    no_transform_is_left(report)


def test_a_correlation_is_found():
    def fn(u, k):
        n = 2 * LENGTH
        return irfft(rfft(u, n=n) * rfft(k, n=n).conj(), n=n)[..., :LENGTH]

    assert FORWARD in found(compare(fn, u(), k()))


def test_layers_of_convolutions_are_all_found():
    def fn(x, a, b):
        for filters in (a, b):
            x = torch.tanh(convolved(2 * LENGTH, slice(0, LENGTH))(x, filters))
        return x

    report = compare(fn, u(), k(), k())
    assert found(report) == [FORWARD] * 2 + [BACKWARD] * 2
    no_transform_is_left(report)


def test_gradients_that_nobody_needs_are_not_computed():
    for args in ((u().detach(), k()), (u(), k().detach())):
        report = compare(convolved(2 * LENGTH, slice(0, LENGTH)), *args)
        assert found(report) == [FORWARD, BACKWARD]
        assert not any(s.note for s in report.substitutions)
        no_transform_is_left(report)


def test_inference_is_found():
    with torch.no_grad():
        args = u(), k(), u(CHANNELS)
        torch.testing.assert_close(compiled(s4d)(*args), s4d(*args), rtol=1e-5, atol=1e-5)
    assert found(fusebackend.last_report()) == [FORWARD]


# ---- what is left ----


def reasons(fn, *args, **options):
    report = compare(fn, *args, **options)
    assert not report.substitutions
    return " ".join(r.reason for r in report.rejections)


def test_what_wraps_around_is_left():
    assert "an FFT of 24 points for rows of 24 and 24 samples, which takes 47" in reasons(convolved(LENGTH, slice(0, LENGTH)), u(), k())
    assert "which takes 32" in reasons(convolved(LENGTH + 9 - 2, slice(0, LENGTH)), u(), k(9))
    assert "wraps around" in reasons(convolved(2 * LENGTH, slice(0, LENGTH)), u(), k(2 * LENGTH))
    assert "wraps around" in reasons(convolved(LENGTH, slice(7, LENGTH)), u(), k(9))


def test_lengths_of_which_it_is_not_known_whether_they_wrap_are_left():
    def fn(u, k):
        n = 2 * u.shape[-1]
        return irfft(rfft(u, n=n) * rfft(k, n=n), n=n)[..., : u.shape[-1]]

    assert "not known of these symbolic lengths" in reasons(fn, u(), k(9), dynamic=True)


@torch.no_grad()
@pytest.mark.parametrize("rows", [(1,), ()])
def test_copies_that_broadcast_are_left(rows):
    n = 2 * LENGTH

    def fn(u, k):
        several = torch.empty(3, LENGTH + 1, dtype=torch.complex64)
        several.copy_(rfft(u, n=n) * rfft(k, n=n))
        return irfft(several.sum(0), n=n)[..., :LENGTH]

    args = u(*rows, LENGTH), torch.randn(*rows, LENGTH)
    assert torch.allclose(compiled(fn)(*args), fn(*args), rtol=1e-4, atol=1e-4)
    report = fusebackend.last_report()
    assert not report.substitutions and "copied into a tensor of another shape or dtype" in " ".join(r.reason for r in report.rejections)


def test_complex_values_that_are_used_elsewhere_are_left():
    def fn(u, k):
        n = 2 * LENGTH
        u_f = rfft(u, n=n)
        return irfft(u_f * rfft(k, n=n), n=n)[..., :LENGTH] + u_f.abs().sum()

    assert "is also used by" in reasons(fn, u(), k())


def test_other_products_are_left():
    n = 2 * LENGTH
    frequencies = torch.randn(CHANNELS, LENGTH + 1, dtype=torch.complex64)
    x = u()

    def gated(u, k):
        return irfft(rfft(u, n=n) * rfft(k, n=n) * rfft(k, n=n), n=n)[..., :LENGTH]

    def filtered(u, k):
        return irfft(rfft(u, n=n) * rfft(k, n=n) * frequencies, n=n)[..., :LENGTH]

    def added(u, k):
        return irfft(rfft(u, n=n) * rfft(k, n=n) + rfft(u, n=n), n=n)[..., :LENGTH]

    def reversed_in_time(u, k):
        return irfft(rfft(u, n=n).conj() * rfft(k, n=n).conj(), n=n)[..., :LENGTH]

    def summed(u, k):
        return irfft((rfft(u, n=n) * rfft(k, n=n)).sum(1), n=n)[..., :LENGTH]

    def imaginary(u, k):
        y = ifft(fft(u, n=n) * fft(k, n=n))
        return (y.real + y.imag)[..., :LENGTH]

    def of_half(u, k):
        return irfft((rfft(u, n=n) * rfft(k, n=n))[..., :9], n=16)

    assert "the product of more than two FFTs" in reasons(gated, x, k())
    assert "multiplied by what is not one" in reasons(filtered, x, k())
    assert "added to a product" in reasons(added, x, k())
    assert "both FFTs are conjugated" in reasons(reversed_in_time, x, k())
    assert "over channels" in reasons(summed, x, k())
    assert "more than the real part" in reasons(imaginary, x, k())
    assert "a part of an FFT" in reasons(of_half, x, k())


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("place", ["product", "rows"])
def test_huge_and_tiny_factors_are_left(scale, place):
    """The replacement scales the taps, which then overflow, or vanish, though the result does neither."""

    def fn(x, w):
        a, b = rfft(x, n=2 * LENGTH), rfft(w, n=2 * LENGTH)
        spectrum = a * b * scale if place == "product" else a * scale * b
        return irfft(spectrum, n=2 * LENGTH)[..., :LENGTH]

    huge, tiny = (1e20, 1e-30) if scale > 1 else (1e-12, 1e30)
    x, w = u().detach() * tiny, k().detach() * huge
    assert "may overflow, or vanish" in reasons(fn, x, w)
    torch.testing.assert_close(compiled(fn)(x, w), fn(x, w))


def test_complex_factors_are_left():
    def fn(x, w):
        return irfft(rfft(x, n=2 * LENGTH) * rfft(w, n=2 * LENGTH) * 1j, n=2 * LENGTH)[..., :LENGTH]

    reasons(fn, u(), k())  # its backward holds the conjugate of a number


def test_fourier_transforms_that_are_no_convolutions_are_not_reported():
    weight = torch.randn(CHANNELS, LENGTH // 2 + 1)

    def mixer(u):  # FNet
        return torch.fft.fft2(u).real

    def analysis(u):
        return rfft(u).abs()

    def roundtrip(u):
        return irfft(rfft(u), n=LENGTH)

    def masked(u):
        return irfft(rfft(u).real * weight + 0j, n=LENGTH)

    for fn in (mixer, analysis, roundtrip, masked):
        report = compare(fn, u())
        assert not report.substitutions and not report.rejections, fn.__name__


def test_rows_that_the_program_overwrites_are_not_read_again():
    def fn(u, k):
        x = u * 1.0
        y = convolved(2 * LENGTH, slice(0, LENGTH))(x, k)
        x.add_(1)
        return y + x

    assert FORWARD in found(compare(fn, u(), k()))
