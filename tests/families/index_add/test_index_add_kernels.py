"""The kernels of index_add against a reference in higher precision."""

from __future__ import annotations

import pytest
import torch

from fusebackend.patterns.index_add import ops as family

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]

# self's shape, the indexed dimension, the number of entries: from none to all of them in one row, slices of one element to thousands, odd
# widths.
SHAPES = [
    ((1000,), 0, 15),
    ((5,), 0, 4000),
    ((7, 64), 0, 1000),
    ((16, 256), 0, 6000),
    ((1, 384), 0, 5000),
    ((100, 33), 0, 513),
    ((300, 1030), 0, 77),
    ((3, 11, 24), 1, 200),
    ((4, 50), -1, 333),
    ((5, 9, 3), 1, 64),
    ((2, 3, 4, 5), 2, 21),
    ((4, 20000), 0, 20),
    ((50, 8), 0, 1),
    ((3000,), 0, 400),
    ((2, 900, 3), 1, 80),
    ((50, 8), 0, 0),
    ((50, 0), 0, 3),
]


pytestmark = pytest.mark.usefixtures("library")


def random_tensor(shape, dtype, device):
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64, device=device).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -3, 4, shape, device=device).to(dtype)


def case(shape, dim, n, dtype, device, index_dtype=torch.int64):
    source_shape = list(shape)
    source_shape[dim] = n
    index = torch.randint(0, shape[dim], (n,), device=device, dtype=index_dtype)
    return random_tensor(shape, dtype, device), index, random_tensor(source_shape, dtype, device)


def options(
    dim,
    index,
    source,
    *,
    weight=None,
    source_index=None,
    alpha=1.0,
    ignore_index=None,
    bounds=family.STRICT,
    precise=False,
    det=False,
):
    return (dim, index, source, weight, source_index, alpha, ignore_index, bounds, precise, det)


def call(self, *args, **kwargs):
    return torch.ops.fusebackend.index_add(self, *options(*args, **kwargs))


def error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300))


def exact_sum(self, dim, index, source):
    """Integers in 64 bits, floats in fp64: on a GPU their order differs from run to run, so the upper halves of fp64 numbers, which
    leave room, are added apart from what they leave."""
    if not self.is_floating_point():
        return self.long().index_add(dim, index, source.long())
    upper, rows = (t.float().double() for t in (self, source))
    return upper.index_add(dim, index, rows) + (self.double() - upper).index_add(dim, index, source.double() - rows)


def check(found, self, exact, eager):
    """No worse than eager, but for what the order of atomic additions, which is chance, makes of it; integers exactly."""
    assert found.dtype == self.dtype and found.shape == self.shape
    if not self.is_floating_point():
        assert torch.equal(found, exact.to(self.dtype))
        return
    slack = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[self.dtype]
    assert error(found, exact) <= 1.1 * error(eager, exact) + slack


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("shape, dim, n", SHAPES)
@pytest.mark.parametrize("det", [False, True])
def test_sums_equal_the_reference(shape, dim, n, dtype, device, det):
    self, index, source = case(shape, dim, n, dtype, device, torch.int32 if n % 2 else torch.int64)
    before = self.clone()
    eager = self.index_add(dim, index, source)
    exact = exact_sum(self, dim, index, source)
    check(call(self, dim, index, source, det=det), self, exact, eager)
    assert torch.equal(self, before)

    in_place = self.clone()
    torch.ops.fusebackend.index_add_(in_place, *options(dim, index, source, det=det))
    check(in_place, self, exact, eager)

    zeros = torch.ops.fusebackend.index_add_zeros(shape[dim], *options(dim, index, source, det=det))
    check(zeros, self, exact - self.to(exact.dtype), eager - self)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape, dim, n", [s for s in SHAPES if s[2] and 0 not in s[0]])
@pytest.mark.parametrize("precise", [False, True])
def test_scales_weights_gathers_and_bounds_equal_the_reference(shape, dim, n, dtype, device, precise):
    self, index, source = case(shape, dim, n, dtype, device)
    rows = shape[dim]
    weight = torch.randint(1, 3, (n,), device=device).to(dtype)
    source_index = torch.randint(-n, n, (n,), device=device, dtype=torch.int32)
    many = {"weight": weight, "source_index": source_index, "alpha": 2.0}
    for bounds, shifted in [(family.STRICT, index), (family.WRAP, index - rows), (family.DROP, index * 2 - rows // 2)]:
        for ignore in (None, int(shifted[0])):
            found = call(self, dim, shifted, source, bounds=bounds, ignore_index=ignore, precise=precise, **many)
            exact = family.reference(self.double(), dim, shifted, source.double(), weight.double(), source_index, 2.0, ignore, bounds)
            if dtype is torch.int32:
                assert torch.equal(found.double(), exact)
            else:
                contention = max(1, n // rows)
                bound = {
                    torch.float32: 1e-6 * contention**0.5,
                    torch.bfloat16: 4e-3 if precise or device == "cpu" else 4e-3 * contention**0.5 + 4e-3,
                }[dtype]
                assert error(found, exact) < bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides_are_taken(dtype, device):
    self, index, source = case((40, 6, 32), 0, 100, dtype, device)
    exact = self.double().index_add(0, index, source.double())
    eager = self.index_add(0, index, source)
    backwards = source.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    strided = torch.randn(100, 12, 70, device=device).to(dtype)[:, ::2, 3:35]
    strided.copy_(source)
    for other in (backwards, strided):
        check(call(self, 0, index, other), self, exact, eager)
    for layout in [(2, 0, 1), (0, 2, 1), (1, 2, 0)]:
        other = self.permute(layout).contiguous().permute([layout.index(d) for d in range(3)])
        found = call(other, 0, index, source)
        assert found.stride() == other.stride()
        check(found, self, exact, eager)
    view = torch.zeros(40, 7, 33, device=device, dtype=dtype)[:, 1:, 1:]
    view.copy_(self)
    torch.ops.fusebackend.index_add_(view, *options(0, index[::1], backwards))
    check(view, self, exact, eager)
    row = torch.randn(1, 6, 32, device=device).to(dtype)
    rows = row.expand(100, 6, 32)
    check(
        call(self, 0, index, rows),
        self,
        self.double().index_add(0, index, rows.double()),
        self.index_add(0, index, rows),
    )
    doubled = torch.stack([index, index], 1)[:, 0]
    check(call(self, 0, doubled, source), self, exact, eager)


def test_out_of_range_is_pytorchs_error_on_cpu():
    self, index, source = case((7, 4), 0, 5, torch.float32, "cpu")
    before = self.clone()
    for bad, bounds in [(7, family.STRICT), (-1, family.STRICT), (7, family.WRAP), (-8, family.WRAP)]:
        index[3] = bad
        with pytest.raises(
            IndexError if bounds == family.WRAP else RuntimeError, match=f"index {bad} is out of bounds for a dimension of size 7"
        ):
            torch.ops.fusebackend.index_add_(self, *options(0, index, source, bounds=bounds))
        assert torch.equal(self, before)
    index[3] = 0
    with pytest.raises(IndexError):
        call(self, 0, index, source, source_index=torch.tensor([0, 1, 2, 3, 5]))
    from_the_end = torch.tensor([0, 1, 2, 3, -1])
    call(self, 0, index, source, source_index=from_the_end)
    with pytest.raises(RuntimeError, match="index -1 is out of bounds for a dimension of size 5"):
        call(self, 0, index, source, source_index=from_the_end, bounds=family.STRICT + family.SOURCE_STRICT)


@pytest.mark.parametrize(
    "self, index, source",
    [
        (torch.zeros(4, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5)),
        (torch.zeros(4, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(4, 4)),
        (torch.zeros(4, 4), torch.zeros(3, dtype=torch.int16), torch.zeros(3, 4)),
        (torch.zeros(4, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.float64)),
        (torch.zeros(1, 4).expand(4, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(self, index, source):
    with pytest.raises(RuntimeError, match="index_add"):
        torch.ops.fusebackend.index_add_(self, *options(0, index, source))


def test_opcheck_of_the_sums():
    self, index, source = case((7, 4), 0, 5, torch.float32, "cpu")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fusebackend.index_add.default, (self, *options(0, index, source)), test_utils=tests)
    torch.library.opcheck(torch.ops.fusebackend.index_add_zeros.default, (7, *options(0, index, source)), test_utils=tests)
    torch.library.opcheck(torch.ops.fusebackend.index_add_.default, (self, *options(0, index, source)), test_utils=tests)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns, n", [(16, 256, 50000), (2000, 384, 60000), (1, 64, 30000), (5000, 64, 50000), (300, 1000, 200)])
def test_deterministic_repeats_bit_for_bit(rows, columns, n, dtype):
    self, index, source = case((rows, columns), 0, n, dtype, "cuda")
    first = call(self, 0, index, source, det=True)
    for _ in range(5):
        assert torch.equal(first, call(self, 0, index, source, det=True))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("rows, columns, n", [(16, 256, 50000), (2000, 64, 60000), (700, 66, 40000), (500, 1030, 3000)])
def test_many_entries_of_narrow_integers_equal_eager(rows, columns, n, dtype):
    self, index, source = case((rows, columns), 0, n, dtype, "cuda")
    assert torch.equal(call(self, 0, index, source), self.index_add(0, index, source))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "rows, columns, n, det", [(16, 256, 5000, False), (1000, 64, 5000, False), (1000, 64, 5000, True), (5, 8, 3, False)]
)
def test_sums_run_on_a_side_stream_and_in_a_cuda_graph(rows, columns, n, det):
    self, index, source = case((rows, columns), 0, n, torch.float32, "cuda")
    exact = self.double().index_add(0, index, source.double())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(self, 0, index, source, det=det)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(self, 0, index, source, det=det)
    graph.replay()
    assert error(found, exact) < 1e-6


@pytest.mark.cuda
def test_neighbours_of_16_bit_elements_keep_their_bits():
    """One 16-bit element is added as one of a pair; the other must not change, not even -0."""
    self = torch.full((64, 3), -0.0, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(0, 64, 2, device="cuda")
    view = self[:, 1:2]
    torch.ops.fusebackend.index_add_(view, *options(0, index, torch.ones(32, 1, device="cuda", dtype=torch.bfloat16)))
    bits = self.view(torch.int16).cpu()
    assert (bits[:, [0, 2]] == -32768).all() and (bits[1::2, 1] == -32768).all() and (self[::2, 1] == 1).all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, n", [((3, 36_000_000), 2), ((2000, 2048), 3001), ((100, 4100), 63), ((40, 1 << 20), 30)])
def test_wide_rows_equal_the_reference(shape, n, dtype):
    """Few and many, some of them twice; also more pieces of a row than a grid's second dimension has blocks."""
    self, index, source = case(shape, 0, n, dtype, "cuda")
    exact = self.double().index_add_(0, index, source.double())
    check(call(self, 0, index, source), self, exact, self.index_add(0, index, source))


@pytest.mark.cuda
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements_are_summed():
    far = 2**31 + 100
    self = torch.zeros(far + 8, device="cuda", dtype=torch.int8)
    index = torch.tensor([far, 3, far, far + 7], device="cuda")
    torch.ops.fusebackend.index_add_(self, *options(0, index, torch.ones(4, device="cuda", dtype=torch.int8)))
    assert self[far] == 2 and self[3] == 1 and self[far + 7] == 1 and self.count_nonzero() == 3
    del self
    source = torch.ones(70000, 32768, device="cuda", dtype=torch.int8)
    index = torch.arange(70000, device="cuda") % 700
    for det in (False, True):
        found = torch.ops.fusebackend.index_add_zeros(700, *options(0, index, source, det=det))
        assert (found == 100).all()
