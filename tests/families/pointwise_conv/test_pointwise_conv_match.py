"""Gradients of 1x1 convolutions: which become products, what these give, in which memory order, and that others are left with a reason."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from families.compiled_results import alike
from families.traced_graphs import traced
from torch import nn

import fusebackend
from fusebackend.fuzz.imagined_gpu import imagined_gpu
from fusebackend.patterns.pointwise_conv.match import PointwiseConvBackward
from fusebackend.rewriting.pattern import Match, Reject

aten = torch.ops.aten
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
PATTERN = PointwiseConvBackward()
OPTIONS = {"fuse.patterns": PATTERN.name, "fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True}
CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def last(*sizes, dtype=bf16):
    """(batch, channels, pixels ...), channels last."""
    return torch.randn(sizes, dtype=dtype).movedim(1, -1).contiguous().movedim(-1, 1)


def planes(*sizes, dtype=bf16):
    return torch.randn(sizes, dtype=dtype)


def weight(outputs, channels, dims=2, dtype=bf16):
    return torch.randn(outputs, channels, *[1] * dims, dtype=dtype)


def answer(x, w, grad=None, stride=1, groups=1, mask=(True, True, False), device="cuda", dynamic=False):
    """The pattern's, of the gradients of a convolution."""
    dims = x.dim() - 2

    def gradients(grad, x, w):
        numbers = [len(w)], [stride] * dims, [0] * dims, [1] * dims, False, [0] * dims, groups
        return [t for t in aten.convolution_backward(grad, x, w, *numbers, list(mask)) if t is not None]

    grad = CONV[x.dim()](x, w, None, stride, 0, 1, groups) if grad is None else grad
    graph = traced(gradients, grad, x, w, device=device, dynamic=dynamic)
    graph.eliminate_dead_code()
    (node,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    return PATTERN.match(node)


def compiled(fn, *args):
    with imagined_gpu():
        torch._dynamo.reset()
        return torch.compile(fn, backend="fuse", options=OPTIONS)(*args)


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


FLAT = [(2, 8, 5, 7), (3, 8, 1, 1), (2, 1, 5, 7), (1, 8, 1, 7)]


@pytest.mark.parametrize(("sizes", "dtype"), [*itertools.product(FLAT, (bf16, f16)), ((2, 8, 2, 3, 4), bf16)])
def test_gradients_are_products(sizes, dtype):
    x, w = last(*sizes, dtype=dtype), weight(6, sizes[1], len(sizes) - 2, dtype)
    grad = last(sizes[0], 6, *sizes[2:], dtype=dtype)

    def gradients(grad, x, w):
        dims = x.dim() - 2
        return aten.convolution_backward(grad, x, w, None, [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1, [True, True, False])[
            :2
        ]

    ours, eager = compiled(gradients, grad, x, w), gradients(grad, x, w)
    report = fusebackend.last_report()
    if eager[0].stride() == x.stride():
        assert report.counts() == {PATTERN.name: 1}
    else:  # a CPU without products in bf16 gives 3-D gradients as planes
        assert x.dim() == 5 and ["do not lie channels last" in r.reason for r in report.rejections] == [True]
    for found, expected, exact in zip(ours, eager, gradients(grad.double(), x.double(), w.double())):
        assert alike(found, expected)
        # Eager's kernels for CPUs round once, as the products do.
        assert error(found, exact) <= max(1.2 * error(expected, exact), torch.finfo(dtype).eps)


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
def test_only_the_gradients_that_are_used_are_computed(mask):
    def fn(grad, x, w):
        found = aten.convolution_backward(grad, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        return [t for t, wanted in zip(found, mask) if wanted]

    found = compiled(fn, last(2, 6, 5, 7), last(2, 8, 5, 7), weight(6, 8))
    (made,) = fusebackend.last_report().substitutions
    assert len(found) == sum(mask) == sum("mm" in str(operator) for operator in made.replacement)


def test_a_step_of_a_model_agrees():
    """With a weight that several layers share, and an input without a gradient."""
    torch.manual_seed(0)
    first, shared, end = (nn.Conv2d(*sizes, 1, bias=False) for sizes in ((4, 8), (8, 8), (8, 5)))
    model = nn.Sequential(first, nn.SiLU(), shared, nn.ReLU(), shared, end).to(bf16).to(memory_format=torch.channels_last)
    x = last(3, 4, 6, 5)

    def gradients(fn):
        model.zero_grad()
        fn(x).float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    with imagined_gpu():
        torch._dynamo.reset()
        ours = gradients(torch.compile(model, backend="fuse", options=OPTIONS))
    assert fusebackend.last_report().counts() == {PATTERN.name: 4}
    for found, expected in zip(ours, gradients(model)):
        assert alike(found, expected)
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.float().abs().max()))


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (lambda: answer(last(2, 8, 5, 7, dtype=f32), weight(6, 8, dtype=f32)), "dtype torch.float32"),
        (lambda: answer(last(2, 8, 5, 7), weight(6, 8), mask=(True, True, True)), "the bias's gradient"),
        (lambda: answer(planes(2, 8, 5, 7), weight(6, 8)), "do not lie channels last"),
        (lambda: answer(last(2, 8, 5, 7), weight(6, 8), planes(2, 6, 5, 7)), "do not lie channels last"),
        (lambda: answer(last(2, 8, 5, 9)[..., ::2], weight(6, 8), last(2, 6, 5, 5)), "do not lie channels last"),
        (lambda: answer(last(2, 8, 5, 7), weight(6, 8), dynamic=True), "symbolic sizes"),
    ],
)
def test_what_is_left_has_a_reason(site, reason):
    found = site()
    assert isinstance(found, Reject) and reason in found.reason


@pytest.mark.parametrize(
    "site",
    [
        lambda: answer(last(2, 8, 5, 7), torch.randn(6, 8, 3, 3, dtype=bf16)),
        lambda: answer(last(2, 8, 5, 7), weight(6, 8), stride=2),
        lambda: answer(last(2, 8, 5, 7), weight(8, 4), groups=2),
        lambda: answer(last(0, 8, 5, 7), weight(6, 8)),
        lambda: answer(last(2, 8, 5, 7), weight(6, 8), device="cpu"),
    ],
)
def test_other_convolutions_are_no_candidates(site):
    assert site() is None


def test_where_products_may_be_added_in_half_precision_they_are_not_taken(monkeypatch):
    def found(dtype):
        return answer(last(2, 8, 5, 7, dtype=dtype), weight(6, 8, dtype=dtype))

    assert isinstance(found(f16), Match)
    monkeypatch.setattr(type(torch.backends.cuda.matmul), "__getattr__", lambda self, name: name == "allow_fp16_accumulation")
    assert "added in float16" in found(f16).reason and isinstance(found(bf16), Match)


def test_products_are_taken_where_they_are_as_fast():
    """They take less of the host."""
    estimate = PATTERN.estimate(answer(last(2, 8, 5, 7), weight(6, 8)))
    assert estimate.pays is None and estimate.is_lighter
