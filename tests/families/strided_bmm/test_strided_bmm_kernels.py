"""``strided_bmm`` against fp64: every order of every tensor's dims, sizes of no whole tile, and what is refused."""

import itertools
import math

import pytest
import torch
from families.sums_in_fp32 import assert_rounded_once
from torch._subclasses import FakeTensorMode

from fusebackend.patterns.strided_bmm.ops import DTYPES, plan_facts, reference, refusal

op = torch.ops.fusebackend.strided_bmm
pytestmark = pytest.mark.usefixtures("library")

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
ORDERS = [(0, *inner) for inner in itertools.permutations((1, 2, 3))]
#: outer, batch, m, n, k
SIZES = [(1, 8, 8, 8, 8), (3, 24, 37, 40, 50), (2, 16, 64, 64, 64), (2, 48, 5, 72, 3), (1, 32, 70, 136, 129), (5, 3, 33, 24, 17)]


def in_order(x, order):
    """The same with its dims in this order in memory, and whole vectors along the innermost one."""
    sizes = [x.shape[d] for d in order]
    holder = x.new_zeros((*sizes[:-1], -(-sizes[-1] // 8) * 8))[..., : sizes[-1]]
    holder.copy_(x.permute(order))
    return holder.permute([order.index(d) for d in range(4)])


def operands(sizes, x_order, y_order, device="cpu", dtype=f32):
    outer, batch, m, n, k = sizes
    return tuple(
        in_order(torch.randn(outer, batch, rows, k, device=device).to(dtype), order) for rows, order in ((m, x_order), (n, y_order))
    )


def check(x, y, order):
    got = op(x, y, order)
    exact, magnitude = x.double() @ y.double().mT, x.double().abs() @ y.double().abs().mT
    assert got.shape == exact.shape and got.dtype == x.dtype
    assert got.permute(order).is_contiguous()
    assert_rounded_once(got, exact, magnitude, x.shape[3])
    return got


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_order_of_every_tensor(device, sizes, dtype):
    taken = 0
    for x_order, y_order, order in itertools.product(ORDERS, repeat=3):
        x, y = operands(sizes, x_order, y_order, device, dtype)
        check(x, y, order)  # by a library, where the kernels refuse it
        taken += not refusal(sizes, x.stride(), y.stride(), order, dtype)
    assert taken >= 16


def test_expanded_operands(device):
    x, y = torch.randn(1, 1, 40, 64, device=device), torch.randn(3, 1, 24, 64, device=device)
    check(x.expand(3, 8, 40, 64), y.expand(3, 8, 24, 64), [0, 2, 3, 1])


def test_the_reference_is_the_operator_on_a_cpu():
    x, y = operands((2, 8, 5, 8, 7), ORDERS[0], ORDERS[0])
    for order in ORDERS:
        if not refusal((2, 8, 5, 8, 7), x.stride(), y.stride(), order, f32):
            assert torch.equal(op(x, y, order), reference(x, y, order))


def test_misaligned_data_are_multiplied_by_a_library(device):
    x = torch.randn(2 * 8 * 16 * 32 + 1, device=device)[1:].view(2, 8, 16, 32)
    check(x, x, [0, 2, 3, 1])


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_infinities_and_nan_go_where_they_do_in_eager(device, dtype):
    x, y = operands((2, 8, 40, 40, 24), (0, 2, 1, 3), (0, 2, 1, 3), device, dtype)
    x[0, 3, 1, 2], x[1, 7, 0, 0], y[0, 2, 4, 3], y[1, 1] = math.inf, math.nan, -math.inf, 0
    x[1, 1, 2] = math.inf
    got, wanted = op(x, y, [0, 2, 3, 1]), x @ y.mT
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
    assert torch.equal(got[got.isinf()], wanted[got.isinf()])


@pytest.mark.parametrize("terms", [64, 128])
def test_fp32_is_no_less_exact_than_eager(device, terms):
    x, y = operands((4, 16, 64, 64, terms), (0, 2, 1, 3), (0, 2, 1, 3), device)
    exact = x.double() @ y.double().mT
    ours, eager = ((t.double() - exact).norm() for t in (op(x, y, [0, 2, 3, 1]), x @ y.mT))
    assert ours <= 1.1 * eager


def test_tiles_are_what_blocks_compute():
    x = (64 * 24 * 128, 128, 24 * 128, 1)
    for dtype in DTYPES:
        for order in ((0, 2, 3, 1), (0, 1, 2, 3)):
            facts = plan_facts((64, 24, 64, 64, 128), x, x, order, dtype)
            assert facts["rows"] in (32, 64) and facts["columns"] in (32, 64)


ROWS = (8 * 64 * 64, 64, 8 * 64, 1)
REFUSED = {
    "no elements": ((2, 8, 0, 64, 64), ROWS, ROWS, (0, 1, 2, 3), bf16, "without elements"),
    "no neighbours": ((2, 8, 64, 64, 64), (8 * 64 * 128, 64, 8 * 128, 2), ROWS, (0, 1, 2, 3), bf16, "neighbouring elements"),
    "rows of no whole vectors": ((2, 8, 64, 64, 64), (8 * 64 * 68, 68, 8 * 68 + 1, 1), ROWS, (0, 1, 2, 3), bf16, "aligned"),
    "a batch of no whole vectors": ((2, 12, 64, 64, 64), ROWS, ROWS, (0, 2, 3, 1), bf16, "no multiple of 8"),
    "part of a sector": ((2, 40, 64, 64, 64), ROWS, ROWS, (0, 2, 3, 1), bf16, "odd number of vectors"),
    "columns of no whole vectors": ((2, 8, 64, 60, 64), ROWS, ROWS, (0, 1, 2, 3), bf16, "result in which vectors"),
    "the outer batch innermost": ((2, 8, 64, 64, 64), ROWS, ROWS, (1, 2, 3, 0), bf16, "innermost dim"),
    "rows innermost": ((2, 8, 64, 64, 64), ROWS, ROWS, (0, 1, 3, 2), bf16, "innermost dim"),
    "no permutation": ((2, 8, 64, 64, 64), ROWS, ROWS, (0, 0, 2, 3), bf16, "permutation"),
    "too large a stride": ((2, 8, 64, 64, 64), (1 << 40, 64, 1 << 24, 1), ROWS, (0, 1, 2, 3), bf16, "stride"),
    "fp64": ((2, 8, 64, 64, 64), ROWS, ROWS, (0, 1, 2, 3), torch.float64, "neither 16 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    *product, reason = REFUSED[name]
    assert reason in refusal(*product)


def test_in_fp32_a_batch_of_any_number_of_vectors_is_written():
    assert not refusal((2, 40, 64, 64, 64), ROWS, ROWS, (0, 2, 3, 1), f32)


@pytest.mark.parametrize(
    ("x", "y", "order", "reason"),
    [
        (torch.ones(2, 8, 8, 8), torch.ones(2, 8, 8), [0, 1, 2, 3], "four dims"),
        (torch.ones(2, 8, 8, 8), torch.ones(2, 8, 8, 16), [0, 1, 2, 3], "do not fit"),
        (torch.ones(2, 8, 8, 8), torch.ones(2, 8, 8, 8, dtype=f16), [0, 1, 2, 3], "dtype"),
        (torch.ones(2, 8, 8, 8).double(), torch.ones(2, 8, 8, 8).double(), [0, 1, 2, 3], "float64"),
        (torch.ones(2, 8, 8, 8), torch.ones(2, 8, 8, 8), [0, 1, 2], "permutation"),
    ],
    ids=lambda v: "" if isinstance(v, torch.Tensor) else str(v),
)
def test_what_the_kernel_refuses_its_fake_refuses(x, y, order, reason):
    mode = FakeTensorMode()
    for a, b in ((x, y), (mode.from_tensor(x), mode.from_tensor(y))):
        with pytest.raises(RuntimeError, match=reason):
            op(a, b, order)


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 2, 3, 0)], ids=str)
def test_a_library_multiplies_what_the_kernels_refuse(order):
    x, y = operands((3, 8, 17, 24, 8), (0, 1, 2, 3), (0, 1, 2, 3), "cuda", bf16)
    gaps = torch.stack([x, x], -1).select(-1, 0)
    assert refusal((3, 8, 17, 24, 8), gaps.stride(), y.stride(), order, bf16)
    found, wanted = op(gaps, y, order), reference(x, y, order)
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.cuda
def test_the_same_bits_in_every_run():
    for dtype in DTYPES:
        x, y = operands((3, 24, 64, 64, 128), (0, 2, 1, 3), (0, 2, 1, 3), "cuda", dtype)
        first = op(x, y, [0, 2, 3, 1])
        assert all(torch.equal(op(x, y, [0, 2, 3, 1]), first) for _ in range(3))


@pytest.mark.cuda
def test_side_streams_and_cuda_graphs():
    x, y = operands((3, 24, 64, 64, 128), (0, 2, 1, 3), (0, 2, 1, 3), "cuda", bf16)
    wanted, stream, graph = op(x, y, [0, 2, 3, 1]), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(op(x, y, [0, 2, 3, 1]), wanted)
    with torch.cuda.graph(graph):
        found = op(x, y, [0, 2, 3, 1])
    x.mul_(2)
    graph.replay()
    assert torch.equal(found, 2 * wanted)


@pytest.mark.cuda
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
def test_more_than_2_to_the_31_elements(dtype):
    """Parts of the result are those of parts of the operands."""
    outer, batch, rows, terms = 18_000, 8, 128, 128
    x = torch.empty(outer, rows, batch, terms, device="cuda", dtype=dtype).normal_().transpose(1, 2)
    y = torch.empty(outer, 16, batch, terms, device="cuda", dtype=dtype).normal_().transpose(1, 2)
    assert x.numel() > 2**31
    for order in ([0, 2, 3, 1], [0, 1, 2, 3]):
        found = op(x, y, order)
        for part in (slice(0, 100), slice(outer // 2, outer // 2 + 100), slice(outer - 100, outer)):
            assert torch.equal(found[part], op(x[part], y[part], order))


@pytest.mark.cuda
@pytest.mark.parametrize("x_order", [(0, 2, 1, 3), (0, 2, 3, 1)], ids=str)
@pytest.mark.parametrize("terms", [32, 64, 128])
def test_fp32_is_about_as_exact_as_a_sum_in_a_tree(x_order, terms):
    """Of one route each, and of all that writes a batch innermost; one after another, 128 terms err 2.4 to 3.3 times as much."""
    for draw in (torch.randn, torch.rand):
        x, y = (in_order(draw(2, 16, 64, terms, device="cuda"), order) for order in (x_order, (0, 3, 1, 2)))
        exact = x.double() @ y.double().mT
        eager = (x[:, :, :, None] * y[:, :, None]).sum(-1)
        for order in ([0, 1, 2, 3], [0, 2, 3, 1]):
            if not refusal((2, 16, 64, 64, terms), x.stride(), y.stride(), order, f32):
                assert (op(x, y, order).double() - exact).norm() <= 1.5 * (eager.double() - exact).norm()
