"""Sums of products, and of a factor in the same pass, against fp64: rounded or not, folded rows, tails, misaligned and expanded tensors."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fusebackend.patterns.column_sum.ops import PRODUCT_DTYPES, plan_facts, sums_reference

op = torch.ops.fusebackend.column_sums
pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SHAPES = [
    ((1000, 33), 0, 1),
    ((1001, 4), 0, 1),
    ((5, 70, 8), 1, 2),
    ((3, 4, 5, 6), 1, 3),
    ((3000, 128), 0, 1),
    ((17, 4100), 0, 1),
    ((70000, 3), 0, 1),
    ((20003, 1), 0, 1),
    ((4, 1, 50), 1, 2),
]


def check(x, y, begin, end, *, dtype=f32, mean=False, product_dtype=f32, product_mean=False, rounded=False):
    """Each result has the error of one rounding, and of sums in fp32 whose depth does not grow with their length."""
    got = op(x, y, begin, end, dtype, mean, product_dtype, product_mean, rounded)
    wide, other = x.double(), (x if y is None else y).double()
    product = wide * other
    if rounded:
        product = product.float().to(x.dtype).double()  # of two numbers of 16 bits the product in fp32 is exact, or rounded once
    sources = [(product, product_dtype, product_mean)] if dtype is None else [(wide, dtype, mean), (product, product_dtype, product_mean)]
    assert len(got) == len(sources)
    dims = list(range(begin, end))
    for found, (source, kind, is_mean) in zip(got, sources):
        exact, magnitude = ((t.mean(dims) if is_mean else t.sum(dims)) for t in (source, source.abs()))
        assert found.dtype == kind and found.shape == exact.shape and found.is_contiguous()
        bound = torch.finfo(kind).eps / 2 * exact.abs() + 40 * torch.finfo(f32).eps * magnitude + torch.finfo(kind).tiny
        assert bool(((found.double() - exact).abs() <= bound).all())
    return got


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", sorted(PRODUCT_DTYPES, key=str), ids=str)
@pytest.mark.parametrize(("shape", "begin", "end"), SHAPES, ids=str)
def test_products_and_squares(device, shape, begin, end, dtype, rounded):
    x, y = torch.randn(2, *shape, device=device).to(dtype)
    for other in (y, None):
        check(x, other, begin, end, dtype=None, rounded=rounded)
        check(x, other, begin, end, mean=True, rounded=rounded)
        check(x, other, begin, end, dtype=dtype, product_dtype=dtype, product_mean=True, rounded=rounded)


@pytest.mark.parametrize("dtype", sorted(PRODUCT_DTYPES, key=str), ids=str)
def test_rows_with_gaps_and_misaligned_tensors(device, dtype):
    x, y = torch.randn(2, 700, 67, device=device).to(dtype)
    check(x[:, :64], y[:, 1:65], 0, 1)
    check(x[:, 2:66], y[:, 2:66], 0, 1)
    check(x[:, :64].contiguous(), y[:, :64], 0, 1)  # one has gaps and the other none
    check(x[:, 1:65], None, 0, 1)
    check(x[:, :64], y[3, :64].expand(700, 64), 0, 1)  # one row again and again
    flat, other = x.flatten(), y.flatten()
    check(flat[1 : 1 + 8 * 500].view(500, 8), other[: 8 * 500].view(500, 8), 0, 1)
    check(flat[3 : 3 + 6 * 500].view(2, 250, 6), other[2 : 2 + 6 * 500].view(2, 250, 6), 1, 2)
    batch, more = torch.randn(2, 6, 90, 72, device=device).to(dtype)
    check(batch[:, 5:85], more[:, :80], 1, 2)
    check(batch[::2], more[:3], 1, 2)
    for a, b in ((batch.mT, more.mT), (batch[..., ::2], more[..., 1::2]), (batch, more.transpose(1, 2).contiguous().mT)):  # copied
        check(a, b, 1, 2)
    check(batch.mT, None, 1, 2)


def test_empty_tensors(device):
    for shape in ((0, 4), (4, 0), (3, 0, 5), (0, 3, 5)):
        x = torch.empty(shape, device=device)
        for y in (x.clone(), None):
            plain, product = op(x, y, len(shape) - 2, len(shape) - 1, f32, True, f32, False, False)
            torch.testing.assert_close(plain, x.mean(-2), equal_nan=True)
            torch.testing.assert_close(product, x.sum(-2))


@pytest.mark.parametrize("rows", [1000, 50000])
def test_no_less_exact_than_eager(device, rows):
    x, y = torch.randn(2, rows, 600, device=device)
    exact, _ = (x.double() * y.double()).sum(0), x.double().sum(0)
    ours, eager = ((t.double() - exact).norm() for t in (op(x, y, 0, 1, f32, False, f32, False, False)[1], (x * y).sum(0)))
    assert ours <= 1.05 * eager


def test_products_are_rounded_as_the_graph_rounds_them(device):
    """1 + 2^-5 squared is 1 + 2^-4 + 2^-10, of which bf16 keeps 1 + 2^-4."""
    x = torch.full((512, 8), 1 + 2**-5, device=device).bfloat16()
    for y in (x.clone(), None):
        assert float(op(x, y, 0, 1, None, False, f32, False, True)[0][0]) == 512 * (1 + 2**-4)
        assert float(op(x, y, 0, 1, None, False, f32, False, False)[0][0]) == 512 * (1 + 2**-4 + 2**-10)


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_infinities_and_nan_stay_in_their_columns_and_sums(device, dtype):
    x, y = torch.randn(2, 5000, 33, device=device).to(dtype)
    x[4321, 3], y[17, 5], y[18, 7], y[4000, 7] = math.inf, math.nan, math.inf, 0
    plain, product = op(x, y, 0, 1, f32, False, f32, False, False)
    assert not plain[3].isfinite() and int((~plain.isfinite()).sum()) == 1
    assert int((~product.isfinite()).sum()) == 3 and product[5].isnan()


@pytest.mark.parametrize(("shape", "begin", "end"), SHAPES, ids=str)
def test_the_same_bits_in_every_run(device, shape, begin, end):
    x, y = torch.randn(2, *shape, device=device)
    first = op(x, y, begin, end, f32, False, f32, False, False)
    for _ in range(3):
        again = op(x, y, begin, end, f32, False, f32, False, False)
        assert all(map(torch.equal, again, first))


def test_the_sum_of_a_factor_is_that_of_the_sum_alone_on_a_cpu():
    x, y = torch.randn(2, 4000, 24)
    assert torch.equal(op(x, y, 0, 1, f32, False, f32, False, False)[0], torch.ops.fusebackend.column_sum(x, 0, 1, False, f32))


def test_threads_do_not_change_the_bits():
    x, y = torch.randn(2, 40000, 24)
    threads, arguments = torch.get_num_threads(), (0, 1, f32, False, f32, False, False)
    many = op(x, y, *arguments)
    torch.set_num_threads(1)
    try:
        assert all(map(torch.equal, op(x, y, *arguments), many))
    finally:
        torch.set_num_threads(threads)


ONES = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("x", "y", "end", "dtype", "product_dtype", "reason"),
    [
        (ONES, ONES, 3, f32, f32, "there are no dims"),
        (ONES, ONES[:3], 1, f32, f32, "one shape"),
        (ONES, ONES.half(), 1, f32, f32, "one dtype"),
        (ONES.double(), None, 1, None, f32, "not supported"),
        (ONES, None, 1, None, f64, "not supported"),
        (ONES, None, 1, f64, f32, "not supported"),
        (ONES.long(), None, 1, None, f32, "not supported"),
    ],
    ids=["dims", "shapes", "dtypes", "of fp64", "in fp64", "the first in fp64", "integers"],
)
def test_what_the_kernel_refuses_its_fake_refuses(x, y, end, dtype, product_dtype, reason):
    fake = FakeTensorMode()
    for make in (lambda t: t, lambda t: t if t is None else fake.from_tensor(t)):
        with pytest.raises((RuntimeError, TypeError), match=reason):
            op(make(x), make(y), 0, end, dtype, False, product_dtype, False, False)


def test_the_reference_is_what_the_kernels_compute():
    x, y = torch.randn(2, 300, 20).bfloat16()
    for rounded in (False, True):
        arguments = (0, 1, f32, True, f32, False, rounded)
        torch.testing.assert_close(op(x, y, *arguments), sums_reference(x, y, *arguments), rtol=1e-5, atol=1e-4)


# ---- how a GPU goes about it ----


def test_two_tensors_are_folded_only_where_neither_has_gaps():
    def plan(y_strides, **more):
        return plan_facts((1000, 33), (33, 1), 0, 1, bf16, f32, 132, y_strides=y_strides, products=True, **more)

    assert plan((33, 1))["fold"] == 8 and plan((40, 1))["fold"] == 1 and plan((0, 1))["fold"] == 1
    assert plan(None)["fold"] == 8
    one, two = plan((33, 1), plain=False), plan((33, 1))
    assert two["partials"] == 2 * one["partials"] and two["blocks"] == one["blocks"]


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 8, 33, 128, 1000, 4096, 50280])
@pytest.mark.parametrize("rows", [1, 7, 900, 100_000])
def test_every_plan_can_be_launched(rows, columns, dtype):
    plan = plan_facts((rows, columns), (columns, 1), 0, 1, dtype, f32, 132, y_strides=(columns, 1), products=True)
    assert plan["width"] * plan["vector_bytes"] / dtype.itemsize == plan["fold"] * columns
    assert plan["tiles"] * plan["threads"] >= plan["width"] and 1 <= plan["lanes"] and plan["threads"] <= 512
    assert plan["blocks"] == plan["tiles"] * plan["splits"] >= 1
    assert plan["partials"] in (0, 2 * plan["splits"] * plan["fold"] * columns)


# ---- on a GPU ----


@pytest.mark.cuda
def test_many_shapes_on_a_gpu():
    for columns in (1, 2, 7, 8, 31, 64, 100, 129, 512, 1030, 2048, 5000):
        for rows in (1, 5, 333, 20011):
            for dtype in (f32, bf16):
                x, y = torch.randn(2, rows, columns, device="cuda").to(dtype)
                check(x, y, 0, 1)
                check(x, None, 0, 1)
    for batch in (1, 3, 200):
        for columns in (3, 64, 1000):
            x, y = torch.randn(2, batch, 150, columns, device="cuda").bfloat16()
            check(x, y, 1, 2, rounded=True)


@pytest.mark.cuda
def test_side_streams_and_cuda_graphs():
    x, y = torch.randn(2, 60000, 96, device="cuda")
    arguments = (0, 1, f32, False, f32, False, False)
    wanted, stream, graph = op(x, y, *arguments), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert all(map(torch.equal, op(x, y, *arguments), wanted))
    with torch.cuda.graph(graph):
        found = op(x, y, *arguments)
    y.mul_(2)
    graph.replay()
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], 2 * wanted[1])
