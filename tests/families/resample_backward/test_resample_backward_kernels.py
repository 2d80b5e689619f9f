"""Sums at grids of indices against fp64: orders of memory, terms, indices of any order; infinities, repetition, graphs, errors, forms."""

import itertools
import subprocess
import sys

import pytest
import torch

from fusebackend.patterns.resample_backward.ops import DTYPES, accumulator, plan_facts, reference

op = torch.ops.fusebackend.resample_backward
pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
PAIRS = [(f64, f64), *itertools.product((f32, f16, bf16), repeat=2)]

#: Sizes of the gradient, the first axis, sizes of the result along the axes, terms.
SHAPES = [
    ((2, 8, 10, 12), 2, [5, 6], [2, 2]),
    ((3, 5, 7, 13), 2, [5, 9], [1, 1]),
    ((2, 3, 33, 64), 2, [40, 100], [4, 4]),
    ((2, 16, 10, 12), 1, [7, 5], [2, 1]),
    ((2, 3, 4, 6, 8), 2, [2, 3, 5], [2, 2, 2]),
    ((3, 70), 1, [33], [3]),
    ((7, 6, 24), 0, [3, 2], [1, 2]),
    ((1, 2, 9000), 2, [4000], [2]),
    ((2, 2, 1, 1), 2, [3, 3], [2, 2]),
    ((2, 3, 300, 9), 2, [1, 4], [1, 1]),
    ((40, 5, 60, 64), 2, [30, 32], [2, 2]),
    ((40, 5, 60, 63), 2, [30, 32], [2, 1]),
    ((70, 50, 7, 7), 2, [14, 14], [1, 1]),
]


def drawn(shape, dim, sizes, terms, dtype, device, up=True, weighted=True):
    """A gradient, indices and weights."""
    indices = []
    for axis, (size, count) in enumerate(zip(sizes, terms)):
        length = shape[dim + axis]
        for term in range(count):
            i = torch.randint(-size, size, (length,)) if not up else (torch.arange(length) * size // length + term).clamp_max(size - 1)
            indices.append(i.to(device))
    weights = [torch.randn(len(i), dtype=accumulator(dtype), device=device) for i in indices] if weighted else []
    return torch.randn(shape, device=device).to(dtype), indices, weights


def check(grad, dim, indices, weights, terms, sizes, order, dtype):
    """The result has the error of one rounding, and of a sum in the accumulator's type."""
    got = op(grad, dim, indices, weights, terms, sizes, order, dtype)
    wide = [w.double() for w in weights]
    exact = reference(grad.double(), dim, indices, wide, terms, sizes, order, f64)
    magnitude = reference(grad.double().abs(), dim, indices, [w.abs() for w in wide], terms, sizes, order, f64)
    assert got.dtype == dtype and got.shape == exact.shape and got.stride() == exact.stride()
    numbers = 64 + sum(len(i) for i in indices)
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + numbers * torch.finfo(accumulator(grad.dtype)).eps * magnitude
    assert bool(((got.double() - exact).abs() <= bound + torch.finfo(dtype).tiny).all())
    return got


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
@pytest.mark.parametrize(("shape", "dim", "sizes", "terms"), SHAPES, ids=str)
def test_sums_in_any_order_of_memory(device, shape, dim, sizes, terms, before, after):
    dims = list(range(len(shape)))
    for up, weighted in itertools.product((True, False), repeat=2):
        grad, indices, weights = drawn(shape, dim, sizes, terms, before, device, up, weighted)
        check(grad, dim, indices, weights, terms, sizes, dims, after)
        last = [dims[0], *dims[2:], 1] if len(dims) > 2 else dims[::-1]
        inverse = sorted(dims, key=last.__getitem__)
        check(grad.permute(last).contiguous().permute(inverse), dim, indices, weights, terms, sizes, last, after)
        check(grad, dim, [i.int() for i in indices], weights, terms, sizes, last, after)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_strides_and_offsets(device, dtype):
    """Expanded and sliced gradients, rows that begin anywhere, strided indices and weights."""
    for columns, channels in ((12, 8), (13, 6), (16, 3)):
        grad, indices, weights = drawn((2, channels, 10, columns), 2, [5, 6], [2, 1], dtype, device)
        numbers = [2, 1], [5, 6], [0, 1, 2, 3], dtype
        padded = torch.randn(2, channels + 1, 11, columns + 3, device=device).to(dtype)
        for given in (
            padded[:, 1:, 1:, 2:-1],
            grad[:1].expand(2, -1, -1, -1),
            grad[..., :1].expand(grad.shape),
            grad.flip(3).mT.contiguous().mT,
        ):
            check(given, 2, indices, weights, *numbers)
            check(given, 2, indices, weights, [2, 1], [5, 6], [0, 2, 3, 1], dtype)
        strided = [torch.stack([i, i], 1)[:, 0] for i in indices], [torch.stack([w, w], 1)[:, 1] for w in weights]
        check(grad, 2, *strided, *numbers)


def test_one_element_takes_all(device):
    """Longer lists than a thread keeps, and rows without any."""
    for shape, order in (((2, 3, 40, 50), [0, 1, 2, 3]), ((2, 8, 40, 50), [0, 2, 3, 1])):
        grad = torch.randn(shape, device=device)
        grad = grad.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))
        i, j = torch.full((40,), 2, device=device), torch.full((50,), 1, device=device)
        check(grad, 2, [i, j], [], [1, 1], [4, 3], order, f32)


def test_what_is_not_finite_stays_where_it_belongs(device):
    grad, indices, _ = drawn((1, 2, 8, 8), 2, [4, 4], [1, 1], f32, device)
    grad[0, 0, 3, 5], grad[0, 1, 0, 0] = float("inf"), float("nan")
    got = op(grad, 2, indices, [], [1, 1], [4, 4], [0, 1, 2, 3], f32)
    assert got.isinf().nonzero().tolist() == [[0, 0, 1, 2]] and got.isnan().nonzero().tolist() == [[0, 1, 0, 0]]


def test_empty_tensors(device):
    i, none = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    for shape, indices, sizes in (((0, 2, 3, 3), [i, i], [2, 2]), ((2, 2, 0, 3), [none, i], [2, 2]), ((2, 2, 3, 0), [i, none], [2, 0])):
        got = op(torch.randn(shape, device=device), 2, indices, [], [1, 1], sizes, [0, 1, 2, 3], f32)
        assert got.shape == (*shape[:2], *sizes) and not got.any()
    with pytest.raises(RuntimeError, match="out of range of a dimension of size 0"):
        op(torch.randn(1, 2, 3, 3, device=device), 2, [i, i], [], [1, 1], [2, 0], [0, 1, 2, 3], f32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(indices=[torch.zeros(3, dtype=torch.int64)]), "1 indices for 2 terms"),
        (dict(indices=[torch.zeros(3), torch.zeros(3)]), "not int32 or int64"),
        (dict(weights=[torch.ones(3)]), "1 weights for 2 terms"),
        (dict(weights=[torch.ones(3), torch.ones(4)]), "vectors of the gradient's"),
        (dict(terms=[5, 1]), "1 to 4 of an axis"),
        (dict(order=[0, 1, 2, 2]), "no permutation"),
        (dict(dim=3), "out of range for 2 axes"),
        (dict(dtype=f64), "is not supported"),
    ],
)
def test_what_is_refused(change, message):
    i = torch.zeros(3, dtype=torch.int64)
    named = dict(dim=2, indices=[i, i], weights=[], terms=[1, 1], sizes=[2, 2], order=[0, 1, 2, 3], dtype=f32) | change
    with pytest.raises(RuntimeError, match=message):
        op(torch.randn(1, 2, 3, 3), *named.values())


@pytest.mark.cuda
def test_repetition_streams_and_graphs():
    grad, indices, weights = drawn((4, 32, 64, 64), 2, [32, 32], [2, 2], bf16, "cuda")
    numbers = [2, 2], [32, 32], [0, 1, 2, 3], bf16
    first = check(grad, 2, indices, weights, *numbers)
    assert all(torch.equal(op(grad, 2, indices, weights, *numbers), first) for _ in range(5))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(op(grad, 2, indices, weights, *numbers), first)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(grad, 2, indices, weights, *numbers)
    grad.mul_(2)
    graph.replay()
    assert torch.equal(out, first * 2)


@pytest.mark.cuda
def test_an_index_out_of_range_stops_the_kernel():
    code = (
        "import torch, fusebackend.patterns.resample_backward.ops; from fusebackend.native import loader; loader.load();"
        "g, i = torch.ones(1, 2, 3, 3, device='cuda'), torch.full((3,), 2, device='cuda');"
        "torch.ops.fusebackend.resample_backward(g, 2, [i, i], [], [1, 1], [2, 3], [0, 1, 2, 3], torch.float32);"
        "torch.cuda.synchronize()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode != 0 and "device-side assert" in found.stderr, found.stderr


@pytest.mark.parametrize(
    ("shape", "order", "dtype", "form", "vector_bytes"),
    [
        ((2, 8, 10, 12), [0, 2, 3, 1], bf16, "lanes", 16),
        ((2, 6, 10, 12), [0, 2, 3, 1], bf16, "lanes", 4),
        ((2, 3, 10, 12), [0, 2, 3, 1], bf16, "lanes", 2),
        ((2, 3, 10, 12), [0, 2, 3, 1], f64, "lanes", 8),
        ((2, 3, 10, 64), [0, 1, 2, 3], bf16, "planes", 16),
        ((2, 3, 10, 60), [0, 1, 2, 3], bf16, "planes", 2),
        ((2, 3, 10, 60), [0, 1, 2, 3], f32, "planes", 16),
        ((1, 1, 2, 9000), [0, 1, 2, 3], f32, "columns", 4),
        ((2, 3, 10, 12), [0, 1, 2, 3], f32, "elements", 4),
    ],
)
def test_forms(shape, order, dtype, form, vector_bytes):
    strides, step = [0] * 4, 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    numbers = shape, strides, 2, [2, 2], [5, shape[3] // 2], order, dtype, dtype, 132
    facts = plan_facts(*numbers)
    assert facts[form] == 1 and facts["vector_bytes"] == vector_bytes
    assert plan_facts(*numbers, misaligned=dtype.itemsize)["vector_bytes"] == dtype.itemsize


def test_all_dtypes_are_named():
    assert {before for before, _ in PAIRS} == DTYPES
