"""Which graphs become ``causal_conv1d``, that values and gradients stay the same, and what is left to Inductor and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusebackend
from fusebackend.backend import fuse
from fusebackend.fuzz.imagined_gpu import imagined_gpu

BATCH, CHANNELS, LENGTH = 2, 8, 20
FORWARD, BACKWARD = "causal_conv1d", "causal_conv1d_backward"

pytestmark = pytest.mark.usefixtures("on_each_device")


def compiled(fn, dynamic=None, **options):
    return torch.compile(
        fn,
        backend=fuse,
        dynamic=dynamic,
        options={"fuse.strict": True, "fuse.gate": "off", "fuse.patterns": [FORWARD, BACKWARD], **options},
    )


def rows(dtype=torch.float32, length=LENGTH):
    return torch.randn(BATCH, CHANNELS, length, dtype=dtype, requires_grad=True)


def taps(n, dtype=torch.float32):
    return torch.randn(CHANNELS, 1, n, dtype=dtype, requires_grad=True)


def both(fn, *args, tolerance=2e-6, **options):
    """Runs ``fn`` and its gradients eagerly and compiled, compares, and returns the report."""
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    want = fn(*args)
    grad = torch.randn_like(want)
    expected = (want, *torch.autograd.grad(want, leaves, grad))
    got = compiled(fn, **options)(*args)
    assert got.stride() == want.stride()
    for a, b in zip((got, *torch.autograd.grad(got, leaves, grad)), expected):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    return fusebackend.last_report()


def found(report):
    return sorted((s.pattern, s.note) for s in report.substitutions)


def refused(fn, *args):
    report = both(fn, *args)
    assert not report.substitutions
    return {r.reason for r in report.rejections}


def padded(x, w, b=None):
    return F.conv1d(F.pad(x, (w.shape[2] - 1, 0)), w, b, groups=CHANNELS)


def sliced(x, w, b=None):
    return F.conv1d(x, w, b, padding=w.shape[2] - 1, groups=CHANNELS)[..., : x.shape[2]]


PLAIN = [(FORWARD, ""), (BACKWARD, "")]
SILU = [(FORWARD, "absorbs SiLU"), (BACKWARD, "absorbs SiLU")]


@pytest.mark.codegen
@pytest.mark.parametrize("k", [2, 4, 31, LENGTH, 2 * LENGTH])
def test_a_pad_before_a_convolution_is_absorbed(k):
    assert found(both(padded, rows(), taps(k), torch.randn(CHANNELS, requires_grad=True))) == PLAIN


@pytest.mark.codegen
def test_pads_by_modules_are_absorbed():
    class Model(torch.nn.Module):
        def __init__(self, pad):
            super().__init__()
            self.pad = pad
            self.conv = torch.nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS)

        def forward(self, x):
            return self.conv(self.pad(x))

    for pad in (torch.nn.ZeroPad1d((3, 0)), torch.nn.ZeroPad2d((3, 0, 0, 0)), torch.nn.ConstantPad1d((3, 0), 0.0)):
        assert found(both(Model(pad), rows())) == PLAIN


@pytest.mark.codegen
def test_an_empty_pad_is_read():
    """Without padding it is no causal convolution, but matching must not fail: ``fuse.strict`` would raise."""
    fn = torch.compile(
        lambda x, w: F.conv1d(F.pad(x, ()), w, groups=CHANNELS), backend="fuse", options={"fuse.strict": True, "fuse.gate": "off"}
    )
    x, w = torch.randn(2, CHANNELS, LENGTH), torch.randn(CHANNELS, 1, 3)
    assert torch.allclose(fn(x, w), F.conv1d(x, w, groups=CHANNELS), atol=1e-5)


@pytest.mark.codegen
def test_a_conversion_between_pad_and_convolution_as_under_autocast_is_absorbed():
    def fn(x, w):
        return F.conv1d(F.pad(x, (6, 0)).to(torch.bfloat16), w, groups=CHANNELS)

    report = both(fn, rows(), taps(7, torch.bfloat16), tolerance=1e-2)
    assert found(report) == [(FORWARD, ""), (BACKWARD, "")]
    assert all(f"f32[{BATCH}, {CHANNELS}, {LENGTH}]" in s.inputs for s in report.substitutions), "nothing is padded"

    def shared(x, w):  # the padded gradient is needed elsewhere
        wide = F.pad(x, (6, 0))
        return F.conv1d(wide.to(torch.bfloat16), w, groups=CHANNELS) * wide.sum().to(torch.bfloat16)

    both(shared, rows(), taps(7, torch.bfloat16), tolerance=2e-2)


@pytest.mark.codegen
def test_a_slice_after_a_padded_convolution_is_absorbed():
    assert found(both(lambda x, w: 2 * sliced(x, w), rows(), taps(4))) == PLAIN
    assert found(both(sliced, rows(), taps(4))) == PLAIN  # the slice itself is returned, with its strides


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_is_absorbed_in_both_directions(dtype):
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for convolution in (sliced, padded):
        report = both(lambda x, w: F.silu(convolution(x, w)), rows(dtype), taps(4, dtype), tolerance=tolerance)
        assert found(report) == SILU


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_gradient_outside_of_the_backward_is_absorbed(dtype, monkeypatch):
    """On GPUs Inductor sums the bias's gradient outside of the convolution's backward. Left there, it would need the value before SiLU,
    and with it the original convolution."""
    monkeypatch.setattr("torch._inductor.decomposition.is_gpu", lambda device: True)
    bias = torch.randn(CHANNELS, dtype=dtype, requires_grad=True)

    def fn(x, w, b):
        return F.silu(F.conv1d(F.pad(x, (3, 0)), w, b, groups=CHANNELS))

    report = both(fn, rows(dtype), taps(4, dtype), bias, tolerance=2e-6 if dtype == torch.float32 else 2e-2, **{"fuse.interpret": True})
    assert found(report) == SILU
    joint = next(graph.after for graph in report.graphs if graph.name == "joint")
    assert "causal_conv1d_backward" in joint
    assert "aten.convolution" not in joint and "aten.sum" not in joint, joint


def test_silu_is_not_absorbed_where_the_value_before_it_is_needed():
    def gated(x, w):
        y = padded(x, w)
        return F.silu(y) + y

    assert found(both(gated, rows(), taps(4))) == PLAIN


@pytest.mark.codegen
def test_silu_is_absorbed_in_inference():
    with torch.no_grad():
        compiled(lambda x, w: F.silu(sliced(x, w)))(rows(), taps(4))
    assert found(fusebackend.last_report()) == SILU[:1]


@pytest.mark.codegen
def test_mambas_block_is_found():
    def mamba(x, w, b):
        return F.silu(sliced(x.transpose(1, 2), w.unsqueeze(1), b)).transpose(1, 2)

    x = torch.randn(BATCH, LENGTH, CHANNELS, requires_grad=True)
    w, b = torch.randn(CHANNELS, 4, requires_grad=True), torch.randn(CHANNELS, requires_grad=True)
    assert found(both(mamba, x, w, b)) == SILU


@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_transposed_input_is_not_copied(dynamic):
    def fn(x, w):
        return F.silu(padded(x, w))

    for length in (24, *((40, 35) if dynamic else ())):  # compiled for whole vectors of samples; other lengths may follow
        x = torch.randn(BATCH, length, CHANNELS, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        report = both(fn, x, taps(4, torch.bfloat16), tolerance=2e-2, dynamic=dynamic)
        assert found(report) == SILU
        assert not any("clone" in name for s in report.substitutions for name in s.new_nodes)


@pytest.mark.codegen
def test_a_slice_after_the_transposition_as_in_mamba_ssm_is_absorbed():
    def mamba(x, w, b):
        y = F.conv1d(x.transpose(1, 2), w, b, padding=3, groups=CHANNELS).transpose(1, 2)[:, :-3]
        return F.silu(y)

    x = torch.randn(BATCH, LENGTH, CHANNELS, requires_grad=True)
    assert found(both(mamba, x, taps(4), torch.randn(CHANNELS, requires_grad=True))) == SILU
    assert found(both(lambda x, w: 2 * mamba(x, w, None), x, taps(4))) == SILU


@pytest.mark.codegen
def test_decoding_steps_are_found():
    def decode(state, x, w):
        y = F.conv1d(torch.cat([state, x], -1), w, groups=CHANNELS)
        return F.silu(y[:, :, -x.shape[-1] :])

    state, w = torch.randn(BATCH, CHANNELS, 4), taps(4)
    for new in (1, 5):
        torch._dynamo.reset()  # sizes are to stay numbers
        x = torch.randn(BATCH, CHANNELS, new)
        with torch.no_grad():
            got = compiled(decode)(state, x, w)
        torch.testing.assert_close(got, decode(state, x, w))
        assert found(fusebackend.last_report()) == SILU[:1]


@pytest.mark.codegen
def test_rwkvs_time_mixing_is_found_with_its_constant():
    def mix(w, k):
        return 0.01 + F.conv1d(F.pad(k, (LENGTH - 1, 0)), torch.exp(w).unsqueeze(1).flip(-1), groups=CHANNELS)

    w = torch.randn(CHANNELS, LENGTH, requires_grad=True)
    assert found(both(mix, w, rows())) == [(FORWARD, "absorbs constant"), (BACKWARD, "")]


@pytest.mark.codegen
def test_padding_on_both_sides_after_or_not_at_all_is_absorbed():
    assert found(both(lambda x, w: F.conv1d(x, w, padding=2, groups=CHANNELS), rows(), taps(5))) == PLAIN
    assert found(both(lambda x, w: F.conv1d(F.pad(x, (0, 3)), w, groups=CHANNELS), rows(), taps(4))) == PLAIN
    assert found(both(lambda x, w: F.conv1d(F.pad(x, (1, 2)), w, padding=2, groups=CHANNELS), rows(), taps(4))) == PLAIN
    assert found(both(lambda x, w: F.conv1d(x, w, groups=CHANNELS), rows(), taps(4))) == PLAIN


@pytest.mark.codegen
def test_backwards_without_some_gradients_are_found():
    frozen = rows().detach()
    assert found(both(lambda x, w: F.silu(padded(x, w)), frozen, taps(4))) == SILU
    assert found(both(lambda x, w: F.silu(padded(x, w)), rows(), taps(4).detach())) == SILU


@pytest.mark.codegen
def test_symbolic_lengths_serve_any_length():
    fn = torch.compile(padded, backend=fuse, dynamic=True, options={"fuse.strict": True, "fuse.gate": "off"})
    w = taps(4)
    for length in (20, 33, 7):
        x = rows(length=length)
        torch.testing.assert_close(fn(x, w), padded(x, w))
    assert FORWARD in {s.pattern for s in fusebackend.last_report().substitutions}


def test_an_unbacked_batch_is_served(interpreted):
    """Its strides are known where its sizes are not."""

    def fn(x, w):
        return F.conv1d(x.transpose(1, 2), w, groups=8, padding=3)[..., : x.shape[1]].transpose(1, 2)

    x, w = torch.randn(5, 21, 8), torch.randn(8, 1, 4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with imagined_gpu():
        torch.testing.assert_close(interpreted(fn, options={"fuse.strict": True})(x, w), fn(x, w))
    assert FORWARD in fusebackend.last_report().counts()


@pytest.mark.codegen
def test_near_misses_are_reported_with_their_reason():
    x, w = rows(), taps(4)

    def reasons(fn, *args):
        return " ".join(refused(fn, *(args or (x, w))))

    assert "padded with 1.0" in reasons(lambda x, w: F.conv1d(F.pad(x, (3, 0), value=1.0), w, groups=CHANNELS))
    assert "cropped" in reasons(lambda x, w: F.conv1d(F.pad(x, (-3, 0)), w, groups=CHANNELS))
    assert "only padding along time" in reasons(lambda x, w: F.conv1d(F.pad(x, (3, 0, 0, 0, 1, 0)), w, groups=CHANNELS))
    assert "stride 2" in reasons(lambda x, w: F.conv1d(x, w, padding=3, stride=2, groups=CHANNELS))
    assert "dilation 2" in reasons(lambda x, w: F.conv1d(x, w, padding=3, dilation=2, groups=CHANNELS))
    assert "groups is 4" in reasons(lambda x, w: F.conv1d(x, w, groups=4), x, torch.randn(CHANNELS, 2, 4, requires_grad=True))
    assert "one output a channel" in reasons(
        lambda x, w: F.conv1d(x, w, groups=CHANNELS), x, torch.randn(2 * CHANNELS, 1, 4, requires_grad=True)
    )
    assert "transposed" in reasons(lambda x, w: F.conv_transpose1d(x, w, groups=CHANNELS))


@pytest.mark.codegen
def test_dense_convolutions_are_not_reported():
    dense = torch.randn(4, CHANNELS, 3, requires_grad=True)
    report = both(lambda x, w: F.conv1d(x, w), rows(), dense, tolerance=2e-5)
    assert not report.substitutions and not report.rejections
