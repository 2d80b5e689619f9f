"""Sums over outer dims against fp64: shapes that fold rows, leave tails and are misaligned; infinities, repetition, streams, graphs."""

import math

import pytest
import torch
from families.row_shapes import SHAPES

from fusebackend.patterns.column_sum.ops import DTYPES, plan_facts, reference

op = torch.ops.fusebackend.column_sum
pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def check(x, begin, end, mean=False, dtype=None):
    """The result has the error of one rounding, and of sums in fp32 or fp64 whose depth does not grow with their length."""
    dtype = dtype or x.dtype
    got = op(x, begin, end, mean, dtype)
    wide = x.double()
    exact, magnitude = (reference(t, begin, end, mean, f64) for t in (wide, wide.abs()))
    assert got.dtype == dtype and got.shape == exact.shape and got.is_contiguous()
    unit = torch.finfo(f64 if f64 in (x.dtype, dtype) else f32).eps
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 40 * unit * magnitude + torch.finfo(dtype).tiny
    assert bool(((got.double() - exact).abs() <= bound).all())
    return got


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize(("shape", "begin", "end"), SHAPES, ids=str)
def test_sums_and_means(device, shape, begin, end, dtype):
    x = torch.randn(shape, device=device).to(dtype)
    for mean in (False, True):
        check(x, begin, end, mean)


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_results_in_a_wider_type(device, dtype):
    x = torch.randn(900, 40, device=device).to(dtype)
    check(x, 0, 1, dtype=f32)
    check(x, 0, 1, True, dtype=f64)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_rows_with_gaps_and_misaligned_tensors(device, dtype):
    x = torch.randn(700, 67, device=device).to(dtype)
    check(x[:, :64], 0, 1)
    check(x[:, 1:65], 0, 1)
    check(x[3:], 0, 1)
    check(x.flatten()[1 : 1 + 8 * 500].view(500, 8), 0, 1)
    check(x.flatten()[3 : 3 + 6 * 500].view(2, 250, 6), 1, 2)
    batch = torch.randn(6, 90, 72, device=device).to(dtype)
    check(batch[:, 5:85], 1, 2)
    check(batch[::2], 1, 2)
    check(batch[:, :, 8:56], 1, 2)
    check(batch[:, :, 3:], 0, 2)
    check(batch[0, :1].expand(50, 72), 0, 1)  # one row again and again
    for other in (batch.mT, batch.transpose(0, 1), batch[:, :5], batch[..., ::2]):  # some of these are copied first
        check(other, 0, 2)
        check(other, 1, 2)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_empty_tensors(device, dtype):
    for shape in ((0, 4), (4, 0), (3, 0, 5), (0, 3, 5)):
        for mean in (False, True):
            x = torch.empty(shape, device=device, dtype=dtype)
            got = op(x, len(shape) - 2, len(shape) - 1, mean, dtype)
            wanted = x.mean(-2) if mean else x.sum(-2)
            torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("rows", [1000, 50000])
def test_no_less_exact_than_eager(device, rows):
    for x in (torch.randn(rows, 600, device=device), torch.rand(rows, 600, device=device)):
        exact = x.double().sum(0)
        ours, eager = ((t.double() - exact).norm() for t in (op(x, 0, 1, False, f32), x.sum(0)))
        assert ours <= 1.05 * eager


@pytest.mark.parametrize("columns", [3, 100])
@pytest.mark.parametrize("rows", [320, 200_000])
def test_on_a_cpu_errors_in_double_precision_do_not_grow_with_the_number_of_rows(rows, columns):
    """Of no wider type there is a reference: sums are compared that are exact but for one rounding."""
    x = torch.rand(rows, columns, dtype=f64)
    exact = torch.tensor([math.fsum(column) for column in x.T.tolist()], dtype=f64)
    found, eager = op(x, 0, 1, False, f64), x.sum(0)
    assert bool(((found - exact).abs() <= 3e-16 * exact).all())
    assert (found - exact).norm() <= (eager - exact).norm() + 1e-16 * exact.norm()


@pytest.mark.parametrize("dtype", [f32, f16, bf16, f64], ids=str)
def test_infinities_and_nan_stay_in_their_columns(device, dtype):
    x = torch.randn(5000, 33, device=device).to(dtype)
    x[4321, 3], x[17, 5], x[18, 7], x[4000, 7] = math.inf, math.nan, math.inf, -math.inf
    got, wanted = op(x, 0, 1, False, dtype), x.sum(0)
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
    assert got[3] == math.inf and got[5].isnan() and got[7].isnan()
    assert int((~got.isfinite()).sum()) == 3


def test_what_overflows_16_bits_only_on_the_way_is_finite(device):
    x = torch.full((4000, 8), 60.0, device=device, dtype=f16)
    x[2000:] = -60
    assert torch.equal(op(x, 0, 1, False, f16), torch.zeros(8, device=device, dtype=f16))


@pytest.mark.parametrize(("shape", "begin", "end"), SHAPES, ids=str)
def test_the_same_bits_in_every_run(device, shape, begin, end):
    x = torch.randn(shape, device=device)
    first = op(x, begin, end, False, f32)
    for _ in range(3):
        assert torch.equal(op(x, begin, end, False, f32), first)


def test_threads_do_not_change_the_bits():
    x, threads = torch.randn(40000, 24), torch.get_num_threads()
    many = op(x, 0, 1, False, f32)
    torch.set_num_threads(1)
    try:
        assert torch.equal(op(x, 0, 1, False, f32), many)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("x", "begin", "end", "reason"),
    [
        (torch.ones(4, 6), 0, 0, "there are no dims"),
        (torch.ones(4, 6), 1, 3, "there are no dims"),
        (torch.ones(4, 6), -1, 1, "there are no dims"),
        (torch.ones(4, 6, dtype=torch.int64), 0, 1, "not supported"),
    ],
    ids=lambda v: "" if isinstance(v, torch.Tensor) else str(v),
)
def test_what_the_kernel_refuses_its_fake_refuses(x, begin, end, reason):
    from torch._subclasses import FakeTensorMode

    for call in (x, FakeTensorMode().from_tensor(x)):
        with pytest.raises(RuntimeError, match=reason):
            op(call, begin, end, False, x.dtype)


# ---- how a GPU goes about it ----


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 8, 33, 128, 500, 768, 1000, 4096, 50280])
@pytest.mark.parametrize("rows", [1, 7, 900, 100_000])
def test_every_plan_can_be_launched(rows, columns, dtype):
    plan = plan_facts((rows, columns), (columns, 1), 0, 1, dtype, dtype, 132)
    vector = plan["vector_bytes"] / dtype.itemsize
    assert plan["width"] * vector == plan["fold"] * columns  # a folded row is so many vectors, no more and no less
    assert plan["tiles"] * plan["threads"] >= plan["width"]
    assert 1 <= plan["lanes"] and plan["threads"] <= 512 and plan["threads"] % 32 == 0
    assert plan["blocks"] == plan["tiles"] * plan["splits"] >= 1
    assert plan["partials"] in (0, plan["splits"] * plan["fold"] * columns)
    # What is left for the second kernel is a small part of what the first one reads, unless all of it is small.
    assert plan["partials"] * 4 <= max(rows * columns * dtype.itemsize / 4, 4 << 20)


def test_rows_are_folded_only_where_they_leave_no_gap():
    assert plan_facts((1000, 33), (33, 1), 0, 1, bf16, bf16, 132)["fold"] == 8
    gaps = plan_facts((1000, 33), (40, 1), 0, 1, bf16, bf16, 132)
    assert gaps["fold"] == 1 and gaps["vector_bytes"] == 2
    assert plan_facts((1000, 34), (40, 1), 0, 1, bf16, bf16, 132)["vector_bytes"] == 4
    assert plan_facts((1000, 32), (40, 1), 0, 1, bf16, bf16, 132)["vector_bytes"] == 16
    assert plan_facts((1000, 32), (32, 1), 0, 1, bf16, bf16, 132, 2)["vector_bytes"] == 2


# ---- on a GPU ----


@pytest.mark.cuda
def test_many_shapes_on_a_gpu():
    for columns in (1, 2, 7, 8, 31, 64, 100, 129, 512, 1030, 2048, 5000):
        for rows in (1, 5, 333, 20011):
            for dtype in (f32, bf16):
                check(torch.randn(rows, columns, device="cuda").to(dtype), 0, 1)
    for batch in (1, 3, 200):
        for columns in (3, 64, 1000):
            check(torch.randn(batch, 150, columns, device="cuda").bfloat16(), 1, 2)


@pytest.mark.cuda
def test_more_elements_than_32_bits_count():
    x = torch.empty(2**21 + 3, 1024, device="cuda", dtype=f16).uniform_(-1, 1)
    exact = sum(part.float().sum(0, dtype=f64) for part in x.split(2**18))
    assert float((op(x, 0, 1, False, f32).double() - exact).norm() / exact.norm()) < 1e-6
    exact = torch.cat([part.float().sum(1) for part in x.view(-1, 8, 128).split(2**16)])
    assert float((op(x.view(-1, 8, 128), 1, 2, False, f32) - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.cuda
def test_side_streams_and_cuda_graphs():
    x = torch.randn(60000, 96, device="cuda")
    wanted, stream, graph = op(x, 0, 1, False, f32), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(op(x, 0, 1, False, f32), wanted)
    with torch.cuda.graph(graph):
        found = op(x, 0, 1, False, f32)
    x.mul_(2)
    graph.replay()
    assert torch.equal(found, 2 * wanted)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "begin", "end"),
    [
        ((8_500_000, 256), 0, 1),
        ((2_200_000_000, 1), 0, 1),
        ((40_000, 7, 8000), 1, 2),  # as many results as the terms leave, in as many groups
        ((2, 1_200_000_000), 0, 1),
        ((3, 700_003, 1027), 1, 2),  # misaligned rows
    ],
    ids=str,
)
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(shape, begin, end):
    x = torch.empty(shape, dtype=bf16, device="cuda").bernoulli_(0.5)
    assert x.numel() > 2**31
    # Counts of ones are exact in fp32 up to 2^24, and nearly so beyond, since the order of the sums is that of a tree.
    torch.testing.assert_close(op(x, begin, end, False, f32).long(), x.sum(begin, dtype=torch.int64), rtol=1e-6, atol=0)
