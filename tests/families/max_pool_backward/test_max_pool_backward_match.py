"""Gradients of max pooling: which are found, in which spellings and orders, what they give, and what is left with a reason."""

import pytest
import torch
import torch.nn.functional as F
from families.traced_graphs import traced
from torch._inductor import inductor_prims  # noqa: F401

import fusebackend
from fusebackend.fuzz.imagined_gpu import imagined_gpu
from fusebackend.patterns.max_pool_backward.match import MaxPoolBackward
from fusebackend.rewriting.pattern import Match, Reject

aten, prims = torch.ops.aten, torch.ops.prims
f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PATTERN = MaxPoolBackward()
OPTIONS = {"fuse.patterns": PATTERN.name, "fuse.strict": True, "fuse.gate": "off", "fuse.interpret": True}


def gradient_of(fn, x, dynamic=False):
    """The compiled gradient against eager's, and the report. Where windows overlap, sums are made in another order."""
    torch._dynamo.reset()
    x = x.detach().requires_grad_()
    out = fn(x)
    grad = torch.randn_like(out)
    (eager,) = torch.autograd.grad(out, x, grad)
    with imagined_gpu():
        (found,) = torch.autograd.grad(torch.compile(fn, backend="fuse", options=OPTIONS, dynamic=dynamic)(x), x, grad)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found, eager, rtol=4 * torch.finfo(x.dtype).eps, atol=8 * torch.finfo(x.dtype).eps)
    return fusebackend.last_report()


def only(report):
    assert report.counts() == {PATTERN.name: 1}, str(report)
    (made,) = report.substitutions
    return made


POOLS = [
    (F.max_pool1d, (2, 3, 19), "windows of 1 by 3"),
    (F.max_pool2d, (2, 3, 9, 14), "windows of 3 by 3"),
    (F.max_pool3d, (2, 3, 5, 6, 9), "windows of 3 by 3 by 3"),
]


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize(("pool", "shape", "note"), POOLS[:2], ids=lambda p: getattr(p, "__name__", ""))
def test_strides_paddings_and_dilations(pool, shape, note, dtype):
    for stride, padding, dilation, ceil in ((2, 1, 1, False), (1, 0, 1, False), (3, 1, 1, True), (2, 0, 2, False)):
        made = only(gradient_of(lambda x: pool(x, 3, stride, padding, dilation, ceil), torch.randn(shape).to(dtype)))  # noqa: B023
        assert made.note == note


def test_three_axes():
    made = only(gradient_of(lambda x: F.max_pool3d(x, 2), torch.randn(2, 3, 4, 6, 8)))
    assert made.note == "windows of 2 by 2 by 2"


@pytest.mark.parametrize(("pool", "shape", "note"), POOLS[:2], ids=lambda p: getattr(p, "__name__", ""))
def test_dynamic_sizes(pool, shape, note):
    assert only(gradient_of(lambda x: pool(x, 3, 2, 1), torch.randn(shape), dynamic=True)).note == note


def test_tensors_without_a_batch_and_of_unlike_windows():
    only(gradient_of(lambda x: F.max_pool2d(x, (2, 3), (2, 1), (1, 0)), torch.randn(3, 8, 9)))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_channels_last(dtype):
    x = torch.randn(2, 8, 9, 14).to(dtype).to(memory_format=torch.channels_last)
    only(gradient_of(lambda x: F.max_pool2d(x * 2, 3, 2, 1).sin(), x))


def test_a_gradient_that_is_expanded_keeps_the_graphs_order():
    torch._dynamo.reset()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with imagined_gpu():
        torch.compile(lambda x: F.max_pool2d(x.sin(), 2).sum(), backend="fuse", options=OPTIONS)(x).backward()
    only(fusebackend.last_report())
    assert "clone" not in str(fusebackend.last_report().substitutions)
    exact = x.detach().requires_grad_()
    F.max_pool2d(exact.sin(), 2).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)


def test_adaptive_pooling_to_a_divisor():
    only(gradient_of(lambda x: F.adaptive_max_pool2d(x.sin(), 4), torch.randn(2, 3, 8, 12)))


def test_elements_that_are_nan_or_infinite():
    x = torch.randn(2, 3, 8, 8)
    x[0, 0, 3, 3], x[1, 2, 0, 0], x[1, 1, 4:6, 4:6] = float("nan"), float("inf"), float("-inf")
    only(gradient_of(lambda x: F.max_pool2d(x, 2), x))


def answers(fn, *inputs):
    return [PATTERN.match(n) for n in traced(fn, *inputs).nodes if n.target in PATTERN.anchors]


@pytest.fixture
def a_gpu():
    with imagined_gpu():
        yield


def places(x, windows=(3, 4), dtype=torch.int8):
    return prims._low_memory_max_pool_offsets_to_indices(x, [2, 2], [6, 8], [2, 2], [0, 0], [1, 1])


GRAD, OFFSETS, X = (2, 3, 3, 4, f32), (2, 3, 3, 4, torch.int8), (2, 3, 6, 8, f32)


def backward(grad, offsets, x):
    return aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places(offsets))


def scattered(grad, offsets, zeros=lambda: torch.zeros(6, 48), shape=(2, 3, 6, 8)):
    return zeros().scatter_add(1, places(offsets).reshape(6, 12), grad.reshape(6, 12)).reshape(shape)


def test_both_spellings_match(a_gpu):
    for found in (*answers(scattered, GRAD, OFFSETS), *answers(lambda g, o: backward(g, o, torch.zeros(2, 3, 6, 8)), GRAD, OFFSETS)):
        assert isinstance(found, Match) and found.note == "windows of 2 by 2"


def test_the_scatter_of_16_bits_is_absorbed_with_its_conversions(a_gpu):
    def fn(grad, offsets):
        out = torch.zeros(6, 48).scatter_add(1, places(offsets).reshape(6, 12), grad.reshape(6, 12).float())
        return out.reshape(2, 3, 6, 8).to(bf16)

    (found,) = answers(fn, (2, 3, 3, 4, bf16), OFFSETS)
    assert isinstance(found, Match) and found.site.grad.op == "placeholder" and len(found.interior) >= 5


def test_a_sum_that_is_wanted_in_fp32_keeps_the_conversion_before_it(a_gpu):
    def fn(grad, offsets):
        return torch.zeros(6, 48).scatter_add(1, places(offsets).reshape(6, 12), grad.float().reshape(6, 12)).reshape(2, 3, 6, 8)

    (found,) = answers(fn, (2, 3, 3, 4, bf16), OFFSETS)
    assert isinstance(found, Match) and found.site.grad.op == "call_function"


@pytest.mark.parametrize(
    ("fn", "inputs", "reason"),
    [
        (
            lambda g, i, x: aten.max_pool3d_with_indices_backward(g, x, [1, 2, 2], [1, 2, 2], [0, 0, 0], [1, 1, 1], False, i),
            (GRAD, (2, 3, 3, 4, torch.int64), X),
            "64 bits",
        ),
        (lambda g, o: scattered(g, o, lambda: torch.ones(6, 48)), (GRAD, OFFSETS), "not zero"),
        (
            lambda g, o: torch.zeros(6, 48).scatter_add(1, places(o).view(6, 12), g.view(6, 12)) * 2,
            (GRAD, OFFSETS),
            "reshaped to the pooled",
        ),
        (lambda g, o: scattered(g, o, shape=(3, 2, 6, 8)), (GRAD, OFFSETS), "other sizes"),
        (lambda g, o: scattered(g.transpose(2, 3), o), ((2, 3, 4, 3, f32), OFFSETS), None),
        (lambda g, o: scattered(g.flip(0), o), (GRAD, OFFSETS), None),
    ],
)
def test_what_is_left_and_why(a_gpu, fn, inputs, reason):
    (found,) = answers(fn, *inputs)
    if reason is None:  # the gradient is what was transposed or flipped
        assert isinstance(found, Match)
    else:
        assert isinstance(found, Reject) and reason in found.reason


def test_a_scatter_at_other_indices_is_none_of_this_family():
    def fn(grad, index):
        return torch.zeros(6, 48).scatter_add(1, index, grad)

    assert answers(fn, (6, 12, f32), (6, 12, torch.int64)) == [None]


def test_on_cpus_there_is_no_kernel():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: F.max_pool2d(x, 2), backend="fuse", options={"fuse.gate": "off"})(x).sum().backward()
    assert PATTERN.name not in fusebackend.last_report().counts()
