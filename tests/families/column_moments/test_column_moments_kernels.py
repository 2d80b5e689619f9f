"""Variances and means over outer dims against fp64: shapes that fold rows, leave tails and are misaligned; means far from 0; repetition."""

import math

import pytest
import torch
from families.row_shapes import SHAPES

from fusebackend.patterns.column_moments.ops import reference
from fusebackend.patterns.column_sum.ops import DTYPES

op = torch.ops.fusebackend.column_moments
pytestmark = pytest.mark.usefixtures("library")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def check(x, begin, end, correction=0.0, dtype=None):
    """Both results are those of fp64, but for one rounding and for errors in fp32 or fp64 that do not grow with the number of rows."""
    dtype = dtype or x.dtype
    epsilon = 1e-5
    variance, mean, scale = op(x, begin, end, correction, epsilon, dtype)
    exact_variance, exact_mean, _ = reference(x.double(), begin, end, correction, epsilon, f64)
    assert scale.dtype == dtype and scale.shape == mean.shape and scale.is_contiguous()
    wanted = torch.rsqrt(variance.double() + epsilon)
    torch.testing.assert_close(scale.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert variance.dtype == mean.dtype == dtype and variance.shape == mean.shape == exact_mean.shape
    assert variance.is_contiguous() and mean.is_contiguous()
    unit, rounding = torch.finfo(f64 if f64 in (x.dtype, dtype) else f32).eps, torch.finfo(dtype).eps / 2
    # A variance is known to the square of what the mean is known to, beside its own rounding.
    deviation = exact_variance.abs().sqrt().nan_to_num()
    bounds = (
        (rounding + 40 * unit) * exact_variance.abs() + 40 * unit * exact_mean.abs() * (deviation + 40 * unit * exact_mean.abs()),
        rounding * exact_mean.abs() + 40 * unit * (exact_mean.abs() + deviation),
    )
    for found, exact, bound in zip((variance, mean), (exact_variance, exact_mean), bounds):
        close = ((found.double() - exact).abs() <= bound + torch.finfo(dtype).tiny) | (found.isnan() & exact.isnan())
        assert bool(close.all()), (found.double() - exact).abs().max()
    return variance, mean


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize(("shape", "begin", "end"), SHAPES, ids=str)
def test_shapes(device, shape, begin, end, dtype):
    for shift in (0, 3):
        x = (torch.randn(shape, device=device) + shift).to(dtype)
        check(x, begin, end)
        check(x, begin, end, 1.0)


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_results_in_a_wider_type(device, dtype):
    x = (torch.randn(900, 40, device=device) + 1).to(dtype)
    check(x, 0, 1, dtype=f32)
    check(x, 0, 1, 1.0, dtype=f64)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_rows_with_gaps_and_misaligned_tensors(device, dtype):
    x = (torch.randn(700, 67, device=device) - 2).to(dtype)
    check(x[:, :64], 0, 1)
    check(x[:, 1:65], 0, 1)
    check(x.flatten()[1 : 1 + 8 * 500].view(500, 8), 0, 1)
    check(x.flatten()[3 : 3 + 6 * 500].view(2, 250, 6), 1, 2)
    batch = torch.randn(6, 90, 72, device=device).to(dtype)
    check(batch[:, 5:85], 1, 2)
    check(batch[::2], 1, 2)
    check(batch[:, :, 3:], 0, 2)
    check(batch[0, :1].expand(50, 72), 0, 1)  # one row again and again
    for other in (batch.mT, batch.transpose(0, 1), batch[..., ::2]):  # some of these are copied first
        check(other, 0, 2)
        check(other, 1, 2)
    image = torch.randn(3, 20, 9, 7, device=device).to(dtype)
    check(image.permute(0, 2, 3, 1), 0, 3)
    check(image.to(memory_format=torch.channels_last).permute(0, 2, 3, 1), 0, 3)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_equal_numbers_have_no_variance(device, dtype):
    x = torch.tensor([1e-30, 3.0, 1e4, 12345.678, -7e20, 1e38, 0.0], dtype=dtype, device=device).repeat(50_001, 1)
    variance, mean, _ = op(x, 0, 1, 0.0, 1e-5, dtype)
    assert torch.equal(variance, torch.zeros_like(variance)) and torch.equal(mean, x[0])


def test_one_element_and_none(device):
    variance, mean, _ = op(torch.ones(1, 3, device=device), 0, 1, 1.0, 1e-5, f32)
    assert variance.isnan().all() and torch.equal(mean, torch.ones(3, device=device))
    variance, mean, _ = op(torch.tensor([[1.0], [3.0]], device=device), 0, 1, 5.0, 1e-5, f32)
    assert variance.item() == math.inf and mean.item() == 2
    for shape in ((0, 4), (3, 0, 5)):
        for found in op(torch.empty(shape, device=device), len(shape) - 2, len(shape) - 1, 0.0, 1e-5, f32):
            assert found.shape == (*shape[:-2], shape[-1]) and found.isnan().all()
    assert op(torch.empty(4, 0, device=device), 0, 1, 0.0, 1e-5, f32)[0].shape == (0,)


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0, 10000.0])
@pytest.mark.parametrize("rows", [333, 50_000])
def test_no_less_exact_than_eager(device, rows, offset):
    x = torch.randn(rows, 600, device=device) + offset
    exact = torch.var_mean(x.double(), 0, correction=0)
    for found, eager, right in zip(op(x, 0, 1, 0.0, 1e-5, f32)[:2], torch.var_mean(x, 0, correction=0), exact):
        ours, eagers = ((t.double() - right).norm() for t in (found, eager))
        assert ours <= 1.05 * eagers + 1e-8 * right.norm()


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
@pytest.mark.parametrize("rows", [320, 20_000, 200_000])
def test_on_a_cpu_errors_in_double_precision_do_not_grow_with_the_number_of_rows(rows, dtype):
    """Of no wider type there is a reference: sums are compared that are exact but for one rounding."""
    x = (torch.rand(rows, 3, dtype=f64) * torch.tensor([1.0, 1e30, 1e-30], dtype=f64)).to(dtype)
    variance, mean, _ = op(x, 0, 1, 0.0, 1e-5, f64)
    for column, found, found_mean in zip(x.double().T.tolist(), variance.tolist(), mean.tolist()):
        exact_mean = math.fsum(column) / rows
        exact = math.fsum((value - exact_mean) ** 2 for value in column) / rows
        assert abs(found_mean - exact_mean) <= 3e-16 * exact_mean and abs(found - exact) <= 5e-16 * exact


def test_an_outlier_in_any_row_does_not_spoil_the_rest(device):
    for row in (0, 1, 7, 4999):
        x = torch.randn(5000, 24, device=device)
        x[row] = 1e6
        check(x, 0, 1)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_infinities_and_nan_stay_in_their_columns(device, dtype):
    x = torch.randn(5000, 33, device=device).to(dtype)
    x[4321, 3], x[17, 5] = math.inf, math.nan
    variance, mean, _ = op(x, 0, 1, 0.0, 1e-5, dtype)
    others = [c for c in range(33) if c not in (3, 5)]
    assert not variance[[3, 5]].isfinite().any() and not mean[[3, 5]].isfinite().any()
    assert variance[others].isfinite().all() and mean[others].isfinite().all()


def test_numbers_near_the_largest_one(device):
    x = torch.full((1000, 8), 3e38, device=device)
    variance, mean, _ = op(x, 0, 1, 0.0, 1e-5, f32)
    assert torch.equal(mean, x[0]) and torch.equal(variance, torch.zeros(8, device=device))


def test_bits_repeat(device):
    x = torch.randn(20_011, 96, device=device).bfloat16()
    first = op(x, 0, 1, 0.0, 1e-5, f32)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(op(x, 0, 1, 0.0, 1e-5, f32), first))


# ---- on a GPU ----


@pytest.mark.cuda
def test_many_shapes_on_a_gpu():
    for columns in (1, 2, 7, 8, 31, 64, 100, 129, 512, 1030, 2048, 5000):
        for rows in (1, 5, 333, 20011):
            for dtype in (f32, bf16):
                check((torch.randn(rows, columns, device="cuda") + 0.5).to(dtype), 0, 1)
    for batch in (1, 3, 200):
        for columns in (3, 64, 1000):
            check(torch.randn(batch, 150, columns, device="cuda").bfloat16(), 1, 2)


@pytest.mark.cuda
def test_side_streams_and_cuda_graphs():
    x = torch.randn(60000, 96, device="cuda")
    wanted, stream, graph = op(x, 0, 1, 0.0, 1e-5, f32), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(op(x, 0, 1, 0.0, 1e-5, f32)[0], wanted[0])
    with torch.cuda.graph(graph):
        found = op(x, 0, 1, 0.0, 1e-5, f32)
    x.mul_(2)
    graph.replay()
    assert torch.equal(found[0], 4 * wanted[0]) and torch.equal(found[1], 2 * wanted[1])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "begin", "end"),
    [
        ((8_500_000, 256), 0, 1),
        ((2_200_000_000, 1), 0, 1),
        ((40_000, 7, 8000), 1, 2),
        ((2, 1_200_000_000), 0, 1),
        ((3, 700_003, 1027), 1, 2),
    ],
    ids=str,
)
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(shape, begin, end):
    x = torch.empty(shape, dtype=bf16, device="cuda").bernoulli_(0.5)
    assert x.numel() > 2**31
    variance, mean, _ = op(x, begin, end, 0.0, 1e-5, f32)
    for part in range(0, shape[-1], 2**27):  # in fp64 and in comparisons all columns would take far more memory than x
        columns = slice(part, part + 2**27)
        share = x[..., columns].sum(begin, dtype=torch.int64).double() / shape[begin]
        torch.testing.assert_close(mean[..., columns].double(), share, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(variance[..., columns].double(), share * (1 - share), rtol=1e-5, atol=1e-6)
