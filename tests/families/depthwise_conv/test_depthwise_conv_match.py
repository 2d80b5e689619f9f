"""Which graphs become ``depthwise_conv``, that values, gradients and strides stay the same, and what is left and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from traced_graphs import traced

import fusebackend
from fusebackend.backend import fuse
from fusebackend.patterns.depthwise_conv.sites import read_backward

aten = torch.ops.aten
FORWARD, BACKWARD = "depthwise_conv", "depthwise_conv_backward"
C = 8

pytestmark = pytest.mark.usefixtures("on_each_device")


def compiled(fn, dynamic=None, **options):
    return torch.compile(
        fn, backend=fuse, dynamic=dynamic, options={"fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True, **options}
    )


def both(fn, *args, tolerance=2e-6, dynamic=None, **options):
    """Runs ``fn`` and its gradients eagerly and compiled, compares, and returns the report."""
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    want = fn(*args)
    grad = torch.randn_like(want)
    expected = (want, *torch.autograd.grad(want, leaves, grad)) if leaves else (want,)
    got = compiled(fn, dynamic, **options)(*args)
    assert got.stride() == want.stride()
    for a, b in zip((got, *(torch.autograd.grad(got, leaves, grad) if leaves else ())), expected):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    return fusebackend.last_report()


def found(report):
    return sorted(s.pattern for s in report.substitutions)


def refused(report):
    return {r.reason for r in report.rejections if r.pattern in (FORWARD, BACKWARD)}


def image(*shape, dtype=torch.float32, channels_last=False, requires_grad=True):
    x = torch.randn(*(shape or (2, C, 9, 10)), dtype=dtype)
    return (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_(requires_grad)


def weight(*taps, outputs=C, dtype=torch.float32):
    return torch.randn(outputs, 1, *taps, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_training(dtype, tolerance, channels_last):
    def fn(x, w, b):
        return F.conv2d(x, w, b, padding=1, groups=C)

    args = image(dtype=dtype, channels_last=channels_last), weight(3, 3, dtype=dtype), torch.randn(C, dtype=dtype, requires_grad=True)
    assert found(both(fn, *args, tolerance=tolerance)) == [FORWARD, BACKWARD]


@pytest.mark.parametrize(
    "more",
    [
        dict(stride=2),
        dict(dilation=2, padding=2),
        dict(stride=(2, 1), padding=(0, 1)),
        dict(padding="same"),
        dict(padding="valid"),
        dict(padding=3),
    ],
)
def test_strides_dilations_and_paddings(more):
    for outputs in (C, 2 * C):
        report = both(lambda x, w: F.conv2d(x, w, groups=C, **more), image(), weight(3, 3, outputs=outputs), tolerance=4e-6)
        assert found(report) == [FORWARD, BACKWARD]


def test_inference_and_each_gradient_alone():
    def fn(x, w):
        return F.conv2d(x, w, padding=2, groups=C)

    x, w = image(), weight(5, 5)
    assert found(both(fn, x.detach(), w.detach())) == [FORWARD]
    assert found(both(fn, x.detach(), w)) == [FORWARD, BACKWARD]
    assert found(both(fn, x, w.detach())) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("outputs, more", [(C, dict(stride=2)), (C, dict(dilation=8, padding=16)), (2 * C, dict(padding=1))])
def test_a_conv1d_that_causal_conv1d_refuses(outputs, more):
    report = both(lambda x, w: F.conv1d(x, w, groups=C, **more), image(2, C, 40), weight(3, outputs=outputs))
    assert found(report) == [FORWARD, BACKWARD]


def test_causal_conv1ds_own_are_left_to_it():
    def fn(x, w):
        return F.conv1d(x, w, padding=1, groups=C)

    assert found(both(fn, image(2, C, 40), weight(3))) == ["causal_conv1d", "causal_conv1d_backward"]
    report = both(fn, image(2, C, 40), weight(3), **{"fuse.patterns": [FORWARD, BACKWARD]})
    assert not found(report) and not refused(report)


def test_symbolic_sizes_are_not_specialised():
    def fn(x, w, b):
        return F.conv2d(x, w, b, stride=2, padding=1, groups=C)

    torch.compiler.reset()
    step = compiled(fn, dynamic=True)
    w, b = weight(3, 3), torch.randn(C, requires_grad=True)
    for shape in ((2, C, 9, 10), (3, C, 16, 13), (5, C, 21, 8)):
        x = image(*shape)
        with torch._dynamo.config.patch(error_on_recompile=shape[0] != 2):
            got = step(x, w, b)
        torch.testing.assert_close(got, fn(x, w, b))
        grads = [torch.autograd.grad(y.sum(), (x, w, b)) for y in (got, fn(x, w, b))]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert FORWARD in found(fusebackend.last_report())


def test_what_is_refused_and_why():
    def grouped(x, w):
        return F.conv2d(x, w, groups=4)

    report = both(grouped, image(), torch.randn(C, 2, 3, 3, requires_grad=True), tolerance=5e-6)
    assert not found(report)
    assert refused(report) == {"2 input channels a group; depthwise convolutions, of one, are supported"}


def test_what_is_no_candidate():
    def dense(x, w):
        return F.conv2d(x, w)

    def transposed(x, w):
        return F.conv_transpose2d(x, w, groups=C)

    def volume(x, w):
        return F.conv3d(x, w, groups=C)

    cases = [(dense, image(), torch.randn(C, C, 3, 3)), (transposed, image(), torch.randn(C, 1, 3, 3))]
    for fn, x, w in [*cases, (volume, image(1, C, 5, 5, 5), torch.randn(C, 1, 3, 3, 3))]:
        report = both(fn, x, w, tolerance=5e-6)
        assert not found(report) and not refused(report)


def test_an_image_without_batch():
    assert found(both(lambda x, w: F.conv2d(x, w, groups=C), image(C, 9, 10), weight(3, 3))) == [FORWARD, BACKWARD]


def test_weights_that_are_channels_last():
    model = torch.nn.Conv2d(C, C, 3, padding=1, groups=C).to(memory_format=torch.channels_last)
    x = image(channels_last=True)
    got = compiled(model)(x)
    grads = torch.autograd.grad(got.sum(), (x, *model.parameters()))
    want = torch.autograd.grad(model(x).sum(), (x, *model.parameters()))
    for a, b in zip(grads, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert a.stride() == b.stride()
    assert found(fusebackend.last_report()) == [FORWARD, BACKWARD]


def test_the_bias_gradient_that_inductor_takes_out(device):
    def backward(grad, x, w):
        return aten.convolution_backward(grad, x, w, [C], [1, 1], [1, 1], [1, 1], False, [0, 0], C, [True, True, True])

    x = torch.randn(2, C, 9, 10, device="cpu")
    graph = traced(backward, x, x, torch.randn(C, 1, 3, 3, device="cpu"), device=device)
    (node,) = [n for n in graph.nodes if n.target is aten.convolution_backward.default]
    of_bias = next(u for u in node.users if u.args[1] == 2)
    with graph.inserting_after(node):
        total = graph.call_function(aten.sum.dim_IntList, (node.args[0], [0, 2, 3]))
    total.meta["val"] = of_bias.meta["val"]
    of_bias.replace_all_uses_with(total)
    graph.erase_node(of_bias)
    site = read_backward(node)
    assert [r is not None for r in site.results] == [True, True, True]
    assert site.results[2].target is aten.sum.dim_IntList


@pytest.mark.codegen
@pytest.mark.parametrize("channels_last", [False, True])
def test_generated_code(channels_last):
    def fn(x, w, v):
        return F.conv2d(F.gelu(F.conv2d(x, w, padding=1, groups=C)), v).relu()

    args = image(channels_last=channels_last), weight(3, 3), torch.randn(16, C, 1, 1, requires_grad=True)
    report = both(fn, *args, tolerance=1e-5, **{"fuse.interpret": False})
    assert found(report) == [FORWARD, BACKWARD]


def test_inductor_keeps_a_backwards_operands_in_the_graphs_memory_order():
    """Where an operator takes any strides, Inductor may store what it computes for it as contiguous."""
    assert torch.Tag.needs_fixed_stride_order in torch.ops.fusebackend.depthwise_conv_backward.default.tags
