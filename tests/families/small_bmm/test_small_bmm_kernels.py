"""Products of small matrices against fp64: every size, order and dtype; infinities, repetition, streams and graphs."""

import math

import pytest
import torch
from families.sums_in_fp32 import assert_rounded_once

from fusebackend.patterns.small_bmm.ops import DTYPES, most_size, plan_facts

op = torch.ops.fusebackend.small_bmm
pytestmark = pytest.mark.usefixtures("library")

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
ORDERS = [(False, False), (True, False), (False, True), (True, True)]
SIZES = [
    (1, 1, 1),
    (2, 3, 4),
    (3, 3, 3),
    (4, 4, 4),
    (5, 1, 7),
    (8, 12, 4),
    (16, 16, 16),
    (17, 9, 31),
    (20, 4, 28),
    (31, 31, 31),
    (32, 32, 32),
]


def operands(batch, m, n, k, transposed=(False, False), device="cpu", dtype=f32):
    a, b = (k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n)
    x, y = (torch.randn(batch, *shape, device=device).to(dtype) for shape in (a, b))
    return x.mT if transposed[0] else x, y.mT if transposed[1] else y


def check(a, b):
    got = op(a, b)
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert got.shape == exact.shape and got.dtype == a.dtype and got.is_contiguous()
    assert_rounded_once(got, exact, magnitude, a.shape[2])
    return got


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_and_orders(device, sizes, dtype):
    for transposed in ORDERS:
        for batch in (1, 2, 77):
            check(*operands(batch, *sizes, transposed, device, dtype))


def one_by_one(a, b):
    """The products with their terms added one after another by fused multiply-adds in fp32."""
    sum_ = torch.zeros(a.shape[0], a.shape[1], b.shape[2], device=a.device)
    for k in range(a.shape[2]):
        sum_ = (a[:, :, k : k + 1].double() * b[:, k : k + 1].double() + sum_.double()).float()
    return sum_


@pytest.mark.parametrize(("sizes", "part"), [((16, 16, 16), 0.85), ((12, 8, 8), 0.95), ((7, 7, 7), 0.97), ((5, 9, 31), 0.85)], ids=str)
def test_errors_are_smaller_than_those_of_terms_added_one_after_another(device, sizes, part):
    for transposed in ORDERS:
        a, b = operands(4000, *sizes, transposed, device)
        exact = a.double() @ b.double()
        assert (op(a, b).double() - exact).norm() <= part * (one_by_one(a, b).double() - exact).norm()


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_misaligned_tensors(device, dtype):
    for offset in (1, 2, 3, 8):
        x = torch.randn(40 * 64 + offset, device=device).to(dtype)[offset:].view(40, 8, 8)
        check(x, x)
        check(x.mT, x)


def test_matrices_that_lie_otherwise_are_copied(device):
    x = torch.randn(6, 8, 10, device=device)
    check(x[:, :, :8], x[:, :, 2:])
    check(x[:1].expand(6, 8, 10), x.mT)
    check(x[::2], x[::2].mT)
    check(x.transpose(0, 1), x.permute(1, 2, 0))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_a_library_multiplies_larger_matrices(device, dtype):
    for sizes in ((33, 4, 5), (4, 40, 5), (4, 5, 64), (3, 4, 0), (0, 4, 5)):
        a, b = operands(6, *sizes, device=device, dtype=dtype)
        torch.testing.assert_close(op(a, b), torch.bmm(a, b))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_no_products(device, dtype):
    assert op(*operands(0, 3, 4, 5, device=device, dtype=dtype)).shape == (0, 3, 4)


@pytest.mark.parametrize("size", [16, 31])
def test_no_less_exact_than_eager(device, size):
    a, b = operands(500, size, size, size, device=device)
    exact = a.double() @ b.double()
    ours, eager = ((t.double() - exact).norm() for t in (op(a, b), torch.bmm(a, b)))
    assert ours <= 1.1 * eager


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("size", [5, 8])
def test_infinities_and_nan_go_where_they_do_in_eager(device, size, dtype):
    a, b = operands(60, size, size, size, device=device, dtype=dtype)
    a[3, 1, 2], a[7, 0, 0], b[9, 4, 3], b[11] = math.inf, math.nan, -math.inf, 0
    a[11, 2] = math.inf
    got, wanted = op(a, b), torch.bmm(a, b)
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
    assert torch.equal(got[got.isinf()], wanted[got.isinf()])


def test_the_same_bits_in_every_run(device):
    for sizes in SIZES:
        a, b = operands(333, *sizes, device=device)
        first = op(a, b)
        assert all(torch.equal(op(a, b), first) for _ in range(3))
        assert torch.equal(op(a[100:], b[100:]), first[100:])  # whatever else is computed


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (torch.ones(2, 3, 4), torch.ones(2, 5, 6), "do not fit"),
        (torch.ones(2, 3, 4), torch.ones(3, 4, 6), "do not fit"),
        (torch.ones(2, 3, 4), torch.ones(2, 4, 6, dtype=f16), "dtype"),
        (torch.ones(2, 3, 4).double(), torch.ones(2, 4, 6).double(), "not supported"),
        (torch.ones(3, 4), torch.ones(4, 6), "three dims"),
    ],
    ids=lambda v: "" if isinstance(v, torch.Tensor) else str(v),
)
def test_what_the_kernel_refuses_its_fake_refuses(a, b, reason):
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    for x, y in ((a, b), (mode.from_tensor(a), mode.from_tensor(b))):
        with pytest.raises(RuntimeError, match=reason):
            op(x, y)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("transposed", ORDERS, ids=str)
def test_every_plan_can_be_launched(transposed, dtype):
    for m in range(1, most_size() + 1):
        for n in (1, 3, 4, 8, 17, 32):
            for k in (1, 4, 31, 32):
                for batch in (1, 70, 10**6):
                    plan = plan_facts((batch, m, n, k), transposed, dtype)
                    assert 0 < plan["shared_bytes"] <= 48 << 10
                    assert plan["products"] * plan["blocks"] >= batch
                    columns = 4 if plan["vectors"] else 1
                    assert plan["threads_a_product"] * plan["row_tile"] * columns >= m * n
                    assert plan["vectors"] == (m % 4 == n % 4 == k % 4 == 0)
    assert not plan_facts((70, 8, 8, 8), transposed, dtype, (0, 4 if dtype is bf16 else 8))["vectors"]


@pytest.mark.cuda
def test_more_elements_than_32_bits_count():
    a = torch.empty(2**22 + 5, 24, 24, device="cuda", dtype=f16).uniform_(-1, 1)
    got = op(a, a)
    for part in (slice(0, 1000), slice(-1000, None)):
        exact = a[part].double() @ a[part].double()
        assert float((got[part].double() - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.cuda
def test_side_streams_and_cuda_graphs():
    a, b = operands(3000, 16, 16, 16, device="cuda")
    wanted, stream, graph = op(a, b), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(op(a, b), wanted)
    with torch.cuda.graph(graph):
        found = op(a, b)
    a.mul_(2)
    graph.replay()
    assert torch.equal(found, 2 * wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("transposed", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (140_000_000, 4, 4, 4),
        (9_000_000, 16, 16, 16),
        (2_200_000, 32, 32, 32),
        (9_000_000, 15, 17, 16),  # nothing aligned
    ],
)
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(batch, m, n, k, transposed):
    def drawn(rows, columns, by_columns):
        matrices = torch.empty((batch, columns, rows) if by_columns else (batch, rows, columns), dtype=bf16, device="cuda").normal_()
        return matrices.mT if by_columns else matrices

    a, b = drawn(m, k, transposed[0]), drawn(k, n, transposed[1])
    found = op(a, b)
    assert max(a.numel(), b.numel(), found.numel()) > 2**31
    for first in (0, batch // 2, batch - 1000):
        part = slice(first, first + 1000)
        assert torch.equal(found[part], op(a[part], b[part]))
