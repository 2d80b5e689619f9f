"""Large sums of several entries a row, which are sorted into buckets of rows: even and uneven indices, and those that are in order."""

import pytest
import torch

from fusebackend.patterns.index_add import ops

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("library")]

KINDS = ["even", "in order", "pairs", "one row", "one hot row", "a few hot rows", "uneven", "halves"]
# Rows, slice, entries, enough to be sorted into buckets for every dtype: buckets of one row and of many, one round of blocks and several,
# several blocks of columns, threads without a column; the last has too few entries a row for 16-bit sums to be kept in fp32.
SHAPES = [
    (3000, (256,), 150_000),
    (20_000, (64,), 1_000_001),
    (300, (1028,), 40_000),
    (700, (3, 5, 24), 120_000),
    (100_000, (32,), 2_200_000),
    (40_000, (128,), 480_000),
]


def index_of(kind, rows, n):
    index = torch.randint(rows, (n,), device="cuda")
    hot = torch.rand(n, device="cuda")
    match kind:
        case "in order":
            return index.sort().values
        case "pairs":
            return index[: n // 2 + 1].repeat_interleave(2)[:n]
        case "one row":
            return torch.full_like(index, rows // 2)
        case "one hot row":
            return torch.where(hot < 0.1, rows // 3, index)
        case "a few hot rows":
            return torch.where(hot < 0.3, index % 7 * (rows // 8), index)
        case "uneven":
            return (hot**4 * rows).long().clamp_max(rows - 1)
        case "halves":  # the first half is in order, the other half is not
            return torch.cat([index[: n // 2].sort().values, index[n // 2 :]])
    return index


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def check(found, exact, eager):
    """No worse than eager, but for what the order of atomic additions, which is chance, makes of it."""
    slack = {torch.float32: 1e-7, torch.float16: 2e-4, torch.bfloat16: 2e-3}[found.dtype]
    assert error(found, exact) <= 1.1 * error(eager, exact) + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_no_larger_than_eagers(kind, shape, dtype):
    rows, slices, n = shape
    index = index_of(kind, rows, n)
    self, source = torch.randn(rows, *slices, device="cuda").to(dtype), torch.randn(n, *slices, device="cuda").to(dtype)
    options = (0, index, source, None, None, 1.0, None, ops.STRICT, False, False)
    exact, eager = self.double().index_add_(0, index, source.double()), self.index_add(0, index, source)
    check(torch.ops.fusebackend.index_add(self, *options), exact, eager)
    in_place = self.clone()
    torch.ops.fusebackend.index_add_(in_place, *options)
    check(in_place, exact, eager)
    exact, eager = exact - self.double(), torch.zeros_like(self).index_add_(0, index, source)
    check(torch.ops.fusebackend.index_add_zeros(rows, *options), exact, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_gathers_and_entries_that_add_nothing_equal_the_reference(kind, dtype):
    rows, n = 3000, 150_000
    index = index_of(kind, rows, n)
    self, source = (torch.randn(rows, 2, 256, device="cuda").to(dtype).transpose(0, 1) for _ in range(2))
    weight, source_index = torch.rand(n, device="cuda").to(dtype), torch.randint(-rows, rows, (n,), device="cuda", dtype=torch.int32)
    for given, ignore, bounds in (
        (index - rows, None, ops.WRAP),
        (index.int(), 7, ops.STRICT),
        (index * 2 - rows // 2, rows // 3, ops.DROP),
    ):
        options = (1, given, source, weight, source_index, 0.5, ignore, bounds)
        exact = ops.reference(self.double(), *options[:2], source.double(), weight.double(), *options[4:])
        kept = torch.ones_like(given, dtype=torch.bool) if ignore is None else given != ignore
        if bounds == ops.DROP:
            kept &= (given >= 0) & (given < rows)
        entries = (source.index_select(1, source_index[kept] % rows) * weight[kept, None]) * 0.5
        eager = self.index_add(1, given[kept] % rows, entries)
        for precise in (False, True):
            found = torch.ops.fusebackend.index_add(self, *options, precise, False)
            assert found.stride() == self.stride()
            check(found, exact, eager)


def test_buckets_are_filled_anew_in_each_replay_of_a_cuda_graph():
    rows, n = 3000, 150_000
    self, source = torch.randn(rows, 256, device="cuda"), torch.randn(n, 256, device="cuda")
    index = index_of("one hot row", rows, n)
    options = (0, index, source, None, None, 1.0, None, ops.STRICT, False, False)
    torch.ops.fusebackend.index_add(self, *options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.fusebackend.index_add(self, *options)
    for kind in ("one hot row", "even", "in order"):
        index.copy_(index_of(kind, rows, n))
        graph.replay()
        check(found, self.double().index_add_(0, index, source.double()), self.index_add(0, index, source))
