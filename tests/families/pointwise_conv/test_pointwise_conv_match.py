"""1x1 convolutions: which become products, what these give, in which memory order, and that others are left with a reason."""

import pytest
import torch
import torch.nn.functional as F
from families.compiled_results import alike
from families.traced_graphs import traced
from torch import nn

import fusebackend
from fusebackend.fuzz.imagined_gpu import imagined_gpu
from fusebackend.patterns.pointwise_conv.match import PointwiseConv, PointwiseConvBackward
from fusebackend.rewriting.pattern import Estimate, Match, Reject

aten = torch.ops.aten
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
NAMES = ["pointwise_conv", "pointwise_conv_backward"]
OPTIONS = {"fuse.patterns": NAMES, "fuse.strict": True, "fuse.gate": "off"}
CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def image(*sizes, dtype=bf16, last=False):
    """(batch, channels, pixels ...), as planes or channels last."""
    x = torch.randn(sizes, dtype=dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def weight(outputs, channels, dims, dtype=bf16):
    return torch.randn(outputs, channels, *[1] * dims, dtype=dtype)


def gradients_of(x, w, mask=(True, True, False), stride=1, grad=None):
    def fn(g, x, w):
        dims = x.dim() - 2
        return aten.convolution_backward(g, x, w, [len(w)], [stride] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1, list(mask))

    grad = CONV[x.dim()](x, w, None, stride) if grad is None else grad
    graph = traced(lambda *a: [t for t in fn(*a) if t is not None], grad, x, w)
    graph.eliminate_dead_code()
    return graph


def answer(pattern, graph):
    (node,) = (n for n in graph.nodes if n.target in pattern.anchors)
    return pattern.match(node)


def compiled(fn, *args, interpret=True, device="cpu", **how):
    torch._dynamo.reset()
    result = torch.compile(fn, backend="fuse", options={**OPTIONS, "fuse.interpret": interpret}, **how)(*args)
    return result, fusebackend.last_report()


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


LAYOUTS = [
    ((2, 8, 50), False),
    ((2, 8, 50), True),
    ((2, 8, 5, 7), False),
    ((2, 8, 5, 7), True),
    ((3, 8, 1, 1), False),
    ((2, 8, 3, 2, 4), False),
]


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize(("sizes", "last"), LAYOUTS)
def test_gradients_are_products(sizes, last, dtype):
    x, w = image(*sizes, dtype=dtype, last=last), weight(6, 8, len(sizes) - 2, dtype)

    def loss(x, w):
        return F.silu(CONV[x.dim()](x, w))

    def run(fn, x, w, grad=None):
        x, w = (t.detach().requires_grad_() for t in (x, w))
        y = fn(x, w)
        grad = torch.randn_like(y) if grad is None else grad.to(y.dtype)
        return y, *torch.autograd.grad(y, (x, w), grad), grad

    with imagined_gpu():
        torch._dynamo.reset()
        ours = run(torch.compile(loss, backend="fuse", options={**OPTIONS, "fuse.interpret": True}), x, w)
    assert fusebackend.last_report().counts()["pointwise_conv_backward"] == 1
    eager, exact = run(loss, x, w, ours[-1]), run(loss, x.double(), w.double(), ours[-1])
    for found, expected, precise in zip(ours[:3], eager, exact):
        assert alike(found, expected)
        # eager's kernels for CPUs round once, as the products do
        assert error(found, precise) <= max(1.2 * error(expected, precise), torch.finfo(dtype).eps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("sizes", [(2, 8, 50), (2, 8, 1), (1, 8, 50)])
def test_a_convolution_of_planes_is_a_product_with_each_image(sizes, last, bias):
    """Also of one that is turned, as behind a linear layer."""
    x, w, b = image(*sizes, last=last), weight(6, 8, 1), torch.randn(6, dtype=bf16) if bias else None
    with imagined_gpu():
        found, report = compiled(lambda x, w, b: F.conv1d(x, w, b).relu(), x, w, b)
    assert report.counts() == {"pointwise_conv": 1}
    exact = F.conv1d(x.double(), w.double(), b.double() if bias else None).relu()
    expected = F.conv1d(x, w, b).relu()
    assert alike(found, expected) and error(found, exact) <= max(1.2 * error(expected, exact), torch.finfo(bf16).eps)


@pytest.mark.parametrize(
    ("mask", "last", "products"),
    [
        ((True, True, False), True, [aten.mm.default, aten.mm.default]),
        ((False, True, False), True, [aten.mm.default]),
        ((True, False, False), True, [aten.mm.default]),
        ((True, True, False), False, [aten.bmm.default, aten.convolution_backward.default]),
        ((True, False, False), False, [aten.bmm.default]),
    ],
)
def test_only_the_gradients_that_are_used_are_computed(mask, last, products):
    x, w = image(2, 8, 5, 7, last=last), weight(6, 8, 2)

    def fn(g, x, w):
        found = aten.convolution_backward(g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        return [t for t, wanted in zip(found, mask) if wanted]

    with imagined_gpu():
        found, report = compiled(fn, torch.randn_like(F.conv2d(x, w)), x, w)
    assert report.counts() == {"pointwise_conv_backward": 1} and len(found) == sum(mask)
    (made,) = report.substitutions
    names = [str(op) for op in made.replacement]
    for op in {aten.mm.default, aten.bmm.default, aten.convolution_backward.default}:
        assert sum(str(op).removesuffix(".default").split(".")[-1] in n.split(".") for n in names) == products.count(op), names


def test_a_step_of_a_model_agrees():
    """With a weight that several layers share, and an input without a gradient."""
    torch.manual_seed(0)
    first, shared, last = (nn.Conv2d(*sizes, 1, bias=False) for sizes in ((4, 8), (8, 8), (8, 5)))
    model = nn.Sequential(first, nn.SiLU(), shared, nn.ReLU(), shared, last).to(bf16)
    model = model.to(memory_format=torch.channels_last)
    x = image(3, 4, 6, 5, last=True)

    def grads(fn):
        model.zero_grad()
        fn(x).float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    with imagined_gpu():
        torch._dynamo.reset()
        ours = grads(torch.compile(model, backend="fuse", options={**OPTIONS, "fuse.interpret": True}))
    assert fusebackend.last_report().counts()["pointwise_conv_backward"] == 4
    for found, expected in zip(ours, grads(model)):
        assert alike(found, expected)
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.float().abs().max()))


NEAR_MISSES = [
    (image(2, 8, 5, 7, dtype=f32, last=True), weight(6, 8, 2, f32), {}, "dtype torch.float32"),
    (image(2, 8, 5, 7, last=True), weight(6, 8, 2), {"mask": (True, True, True)}, "the bias's gradient"),
    (image(2, 8, 5, 7)[..., ::2], weight(6, 8, 2), {"grad": image(2, 6, 5, 7)[..., ::2]}, "neither channels last nor as planes"),
    (image(2, 8, 5, 7), weight(6, 8, 2), {"mask": (False, True, False)}, "a sum of products"),
    (image(2, 8, 5, 7, last=True), weight(6, 8, 2), {"grad": image(2, 6, 5, 7)}, "lie otherwise"),
]


@pytest.mark.parametrize(("x", "w", "how", "reason"), NEAR_MISSES)
def test_what_is_left_has_a_reason(x, w, how, reason):
    found = answer(PointwiseConvBackward(), gradients_of(x, w, **how))
    assert isinstance(found, Reject) and reason in found.reason


@pytest.mark.parametrize(
    ("x", "w", "stride", "groups"),
    [
        (image(2, 8, 5, 7), torch.randn(6, 8, 3, 3, dtype=bf16), 1, 1),
        (image(2, 8, 5, 7), weight(6, 8, 2), 2, 1),
        (image(2, 8, 5, 7), weight(8, 4, 2), 1, 2),
        (image(0, 8, 5, 7), weight(6, 8, 2), 1, 1),
    ],
)
def test_other_convolutions_are_no_candidates(x, w, stride, groups):
    assert answer(PointwiseConv(), traced(lambda x, w: F.conv2d(x, w, None, stride, 0, 1, groups), x, w)) is None


def test_on_a_cpu_nothing_is_looked_for():
    assert answer(PointwiseConv(), traced(F.conv1d, image(2, 8, 5), weight(6, 8, 1), device="cpu")) is None


def test_sizes_that_are_not_known_are_left():
    found = answer(PointwiseConv(), traced(F.conv1d, image(2, 8, 50), weight(6, 8, 1), dynamic=True))
    assert isinstance(found, Reject) and "symbolic sizes" in found.reason


def test_where_products_may_be_added_in_half_precision_they_are_not_taken(monkeypatch):
    monkeypatch.setattr(type(torch.backends.cuda.matmul), "__getattr__", lambda self, name: name == "allow_fp16_accumulation")
    graph = traced(F.conv1d, image(2, 8, 5, dtype=f16), weight(6, 8, 1, f16))
    assert "added in float16" in answer(PointwiseConv(), graph).reason
    assert isinstance(answer(PointwiseConv(), traced(F.conv1d, image(2, 8, 5), weight(6, 8, 1))), Match)


def test_a_convolution_that_inductor_runs_channels_last_is_left(monkeypatch):
    monkeypatch.setattr("fusebackend.rewriting.convolution_layout.is_channels_last_optimised", lambda graph: True)
    found = answer(PointwiseConv(), traced(F.conv2d, image(2, 8, 5, 7), weight(6, 8, 2)))
    assert isinstance(found, Reject) and "channels last, where" in found.reason
    assert isinstance(answer(PointwiseConv(), traced(F.conv1d, image(2, 8, 5), weight(6, 8, 1))), Match), "one dim is never"


def test_two_products_are_lighter_than_two_convolutions():
    """Timed alike they are taken; what copies, or keeps one of cuDNN's calls, must be faster."""
    pattern = PointwiseConvBackward()
    for last in (True, False):
        match = answer(pattern, gradients_of(image(2, 8, 5, 7, last=last), weight(6, 8, 2)))
        found = pattern.estimate(match)
        assert isinstance(found, Estimate) and found.pays is None and found.is_lighter is last
    match = answer(PointwiseConv(), traced(F.conv1d, image(2, 8, 5), weight(6, 8, 1)))
    assert not PointwiseConv().estimate(match).is_lighter
