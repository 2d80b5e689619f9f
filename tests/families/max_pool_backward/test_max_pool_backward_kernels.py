"""Gradients of max pooling against fp64: orders of memory, windows, ends of rows; infinities, repetition, graphs, errors, forms."""

import math

import pytest
import torch
import torch.nn.functional as F

from fusebackend.patterns.max_pool_backward.ops import DTYPES, plan_facts, reference

op = torch.ops.fusebackend.max_pool_backward
pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

#: Sizes of the gradient and of the result along the axes; kernel, stride, padding and dilation.
WINDOWS = [
    ((2, 8, 10, 12), [20, 24], [2, 2], [2, 2], [0, 0], [1, 1]),
    ((2, 8, 10, 12), [19, 23], [3, 3], [2, 2], [1, 1], [1, 1]),
    ((2, 3, 9, 8), [20, 17], [3, 3], [2, 2], [0, 0], [1, 1]),
    ((3, 16, 11, 16), [11, 16], [3, 3], [1, 1], [1, 1], [1, 1]),
    ((2, 5, 7, 33), [7, 33], [5, 5], [1, 1], [2, 2], [1, 1]),
    ((2, 4, 6, 7), [17, 21], [2, 3], [3, 3], [1, 0], [1, 1]),
    ((2, 8, 5, 6), [14, 16], [3, 3], [2, 2], [0, 0], [2, 3]),
    ((2, 3, 40), [81], [3], [2], [1], [1]),
    ((2, 3, 5, 14), [10, 28], [2, 2], [2, 2], [0, 0], [1, 1]),
    ((2, 3, 5, 15), [10, 30], [3, 3], [2, 2], [1, 1], [1, 1]),
    ((70, 300), [600], [2], [2], [0], [1]),
    ((2, 16, 3, 4, 5), [6, 8, 11], [2, 2, 3], [2, 2, 2], [0, 0, 1], [1, 1, 1]),
    ((5, 3), [7], [128], [1], [60], [1]),
    ((2, 3, 1, 1), [1, 1], [1, 1], [1, 1], [0, 0], [1, 1]),
]


def drawn(shape, kernel, dtype, device):
    """A gradient, and places of which some are in no window."""
    most = min(math.prod(kernel) + 1, 128)
    offsets = torch.where(torch.rand(shape) < 0.1, torch.randint(-128, 128, shape), torch.randint(0, most, shape))
    return torch.randn(shape, device=device).to(dtype), offsets.to(torch.int8).to(device)


def check(grad, offsets, *windows):
    """The result has the error of one rounding, and of a sum of as many terms as a window has elements."""
    got = op(grad, offsets, *windows)
    exact, magnitude = (reference(g, offsets, *windows) for g in (grad.double(), grad.double().abs()))
    assert got.dtype == grad.dtype and got.shape == exact.shape and got.stride() == exact.stride()
    eps = torch.finfo(f64 if grad.dtype == f64 else f32).eps
    bound = torch.finfo(grad.dtype).eps / 2 * exact.abs() + math.prod(windows[1]) * eps * magnitude
    assert bool(((got.double() - exact).abs() <= bound + torch.finfo(grad.dtype).tiny).all())
    return got


def reordered(tensor, order):
    return tensor.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize(("shape", "sizes", "kernel", "stride", "padding", "dilation"), WINDOWS, ids=str)
def test_windows_in_any_order_of_memory(device, shape, sizes, kernel, stride, padding, dilation, dtype):
    dims = list(range(len(shape)))
    grad, offsets = drawn(shape, kernel, dtype, device)
    windows = sizes, kernel, stride, padding, dilation
    check(grad, offsets, *windows, dims)
    last = [dims[0], *dims[2:], 1]
    check(reordered(grad, last), reordered(offsets, last), *windows, last)
    check(reordered(grad, last), offsets, *windows, dims)
    check(grad, reordered(offsets, last), *windows, dims[::-1])


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_strides_and_offsets(device, dtype):
    """Expanded and sliced gradients and places, rows that begin anywhere."""
    windows = [19, 23], [3, 3], [2, 2], [1, 1], [1, 1]
    grad, offsets = drawn((2, 8, 10, 12), [3, 3], dtype, device)
    padded, places = drawn((2, 9, 11, 15), [3, 3], dtype, device)
    for given in (
        padded[:, 1:, 1:, 2:-1],
        grad[:1].expand(2, -1, -1, -1),
        grad[..., :1].expand(grad.shape),
        grad.flip(3).mT.contiguous().mT,
    ):
        for order in ([0, 1, 2, 3], [0, 2, 3, 1]):
            check(given, offsets, *windows, order)
            check(given, places[:, 1:, 1:, 2:-1], *windows, order)
    for begin in (1, 4, 8):
        memory, kept = (
            torch.randn(2 * 10 * 12 * 8 + 8, device=device).to(dtype),
            torch.zeros(2 * 10 * 12 * 8 + 8, dtype=torch.int8, device=device),
        )
        shifted = memory[begin : begin + 1920].view(2, 10, 12, 8).permute(0, 3, 1, 2)
        check(shifted, reordered(offsets, [0, 2, 3, 1]), *windows, [0, 2, 3, 1])
        check(reordered(grad, [0, 2, 3, 1]), kept[begin : begin + 1920].view(2, 10, 12, 8).permute(0, 3, 1, 2), *windows, [0, 2, 3, 1])


@pytest.mark.parametrize("pool", [F.max_pool1d, F.max_pool2d, F.max_pool3d], ids=lambda p: p.__name__)
def test_it_is_the_gradient(device, pool):
    """Of what PyTorch pools, with places by the operator of Inductor."""
    from torch._inductor import inductor_prims  # noqa: F401

    axes = (F.max_pool1d, F.max_pool2d, F.max_pool3d).index(pool) + 1
    x = torch.randn(2, 3, *[9, 12, 10][:axes], device=device, requires_grad=True)
    kernel, stride, padding, dilation = ([n] * axes for n in (3, 2, 1, 1))
    out = pool(x, 3, 2, 1)
    grad = torch.randn_like(out)
    if axes == 1:
        x = x.detach()[:, :, None].requires_grad_()
        kernel, stride, padding, dilation, grad = [1, 3], [1, 2], [0, 1], [1, 1], grad[:, :, None]
    _, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(x.detach(), kernel, stride, padding, dilation, False)
    wanted = (F.max_pool3d if axes == 3 else F.max_pool2d)(x, kernel, stride, padding)
    (exact,) = torch.autograd.grad(wanted, x, grad)
    got = op(grad, offsets, list(x.shape[2:]), kernel, stride, padding, dilation, list(range(x.dim())))
    torch.testing.assert_close(got, exact)


def test_what_is_not_finite_stays_where_it_belongs(device):
    grad, offsets = torch.ones(1, 2, 4, 4, device=device), torch.zeros(1, 2, 4, 4, dtype=torch.int8, device=device)
    grad[0, 0, 3, 2], grad[0, 1, 0, 0], offsets[0, 0, 3, 2] = float("inf"), float("nan"), 3
    got = op(grad, offsets, [8, 8], [2, 2], [2, 2], [0, 0], [1, 1], [0, 1, 2, 3])
    assert got.isinf().nonzero().tolist() == [[0, 0, 7, 5]] and got.isnan().nonzero().tolist() == [[0, 1, 0, 0]]


def test_empty_tensors(device):
    for shape, sizes in (((0, 2, 3, 3), [6, 6]), ((2, 2, 0, 3), [2, 6]), ((2, 2, 3, 3), [6, 0])):
        grad, offsets = drawn(shape, [2, 2], f32, device)
        got = op(grad, offsets, sizes, [2, 2], [2, 2], [0, 0], [1, 1], [0, 1, 2, 3])
        assert got.shape == (*shape[:2], *sizes) and not got.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(offsets=torch.zeros(1, 2, 3, 3, dtype=torch.int64)), "not int8"),
        (dict(offsets=torch.zeros(1, 2, 3, 4, dtype=torch.int8)), "offsets of sizes"),
        (dict(sizes=[6]), "2 numbers as of kernel_size are needed"),
        (dict(kernel_size=[]), "1 to 3 are accepted"),
        (dict(kernel_size=[16, 9]), "windows of 144 elements; up to 128"),
        (dict(stride=[2, 0]), "1 to 4194304 are accepted"),
        (dict(padding=[-1, 0]), "0 to 536870912 are accepted"),
        (dict(order=[0, 1, 2, 2]), "no permutation"),
    ],
)
def test_what_is_refused(change, message):
    named = dict(
        offsets=torch.zeros(1, 2, 3, 3, dtype=torch.int8), sizes=[6, 6], kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1]
    )
    with pytest.raises(RuntimeError, match=message):
        op(torch.randn(1, 2, 3, 3), *(named | dict(order=[0, 1, 2, 3]) | change).values())


@pytest.mark.cuda
def test_repetition_streams_and_graphs():
    grad, offsets = drawn((4, 32, 56, 56), [3, 3], bf16, "cuda")
    windows = [112, 112], [3, 3], [2, 2], [1, 1], [1, 1], [0, 1, 2, 3]
    first = check(grad, offsets, *windows)
    assert all(torch.equal(op(grad, offsets, *windows), first) for _ in range(5))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(op(grad, offsets, *windows), first)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(grad, offsets, *windows)
    grad.mul_(2)
    graph.replay()
    assert torch.equal(out, first * 2)


@pytest.mark.cuda
def test_more_results_than_31_bits_count():
    shape = 2, 8, 17000, 17000
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip("needs 24 GiB")
    offsets = torch.full(shape[:2] + (8500, 8500), 3, dtype=torch.int8, device="cuda")
    grad = torch.ones(offsets.shape, dtype=bf16, device="cuda")
    for order in ([0, 1, 2, 3], [0, 2, 3, 1]):
        laid = [t.to(memory_format=torch.channels_last) if order[-1] == 1 else t for t in (grad, offsets)]
        got = op(*laid, list(shape[2:]), [2, 2], [2, 2], [0, 0], [1, 1], order)
        assert bool((got[:, :, 1::2, 1::2] == 1).all()) and not got[:, :, ::2].any() and not got[:, :, :, ::2].any()


@pytest.mark.parametrize(
    ("shape", "order", "dtype", "lanes", "vector"),
    [
        ((2, 8, 10, 12), [0, 2, 3, 1], bf16, 1, 8),
        ((2, 6, 10, 12), [0, 2, 3, 1], bf16, 1, 1),
        ((2, 6, 10, 12), [0, 2, 3, 1], f64, 1, 2),
        ((2, 8, 10, 12), [0, 1, 2, 3], bf16, 0, 8),
        ((2, 8, 10, 12), [0, 1, 2, 3], f32, 0, 4),
        ((2, 8, 10, 14), [0, 1, 2, 3], bf16, 0, 4),
        ((2, 8, 10, 15), [0, 1, 2, 3], bf16, 0, 2),
        ((2, 8, 10, 12), [0, 1, 3, 2], f32, 0, 1),
    ],
)
def test_forms(shape, order, dtype, lanes, vector):
    strides, step = [0] * 4, 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    numbers = shape, strides, strides, [20, 2 * shape[3]], [2, 2], [2, 2], [0, 0], [1, 1], order, dtype, 132
    facts = plan_facts(*numbers)
    assert facts["lanes"] == lanes and facts["vector"] == vector
    if lanes:
        assert plan_facts(*numbers, misaligned=dtype.itemsize)["vector"] == 1
