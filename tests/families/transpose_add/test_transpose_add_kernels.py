"""transpose_add on tensors of any strides: bitwise what ``torch.add`` gives, rounded once."""

import random

import pytest
import torch
from families.tile_tensors import FLOATS, INTEGERS, assert_same_bits, random_shape, strided, values

from fusebackend.patterns.transpose_add.ops import reference, transpose_add

pytestmark = pytest.mark.usefixtures("library")


def check(x, y, alpha, order):
    ialpha = int(alpha) if not x.is_floating_point() else 0
    result = transpose_add(x, y, float(alpha), ialpha, order)
    # Eager's CPU kernel rounds strided 64- and 32-bit operands twice, contiguous ones once as the kernels here.
    shape = torch.broadcast_shapes(x.shape, y.shape)
    same_layout = (t.expand(shape).contiguous() for t in (x, y)) if x.device.type == "cpu" else (x, y)
    assert_same_bits(result, reference(*same_layout, float(alpha), ialpha, order))


@pytest.mark.parametrize("seed", range(14))
def test_random_views_add_bitwise(device, seed):
    rng = random.Random(1000 + seed)
    for _ in range(150):
        shape = random_shape(rng)
        order = list(range(len(shape)))
        rng.shuffle(order)
        dtype = rng.choice(FLOATS + INTEGERS)
        x, y = (strided(rng, shape, dtype, device, expand=True) for _ in range(2))
        while y.dim() and y.shape[0] and rng.random() < 0.2:
            y = y[0]
        if rng.random() < 0.5:
            x, y = y, x
        check(x, y, rng.choice([1, 1, 2, -3, 0.3 if dtype.is_floating_point else 5]), order)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("alpha", [1, -1, 3])
def test_each_operand_may_be_the_transposed_one(device, dtype, alpha):
    for rows, columns in [(128, 256), (131, 257), (64, 40)]:
        a, b = values((rows, columns), dtype, device), values((rows, columns), dtype, device)
        ta, tb = values((columns, rows), dtype, device).t(), values((columns, rows), dtype, device).t()
        for x, y in [(ta, b), (a, tb), (ta, tb), (a, b)]:
            check(x, y, alpha, [0, 1])
            check(x, y, alpha, [1, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_sums_round_as_fp32_does(device, dtype):
    """All pairs of a set of magnitudes that spans the format, denormals and infinities included: double rounding would show."""
    bits = torch.cat([torch.arange(-32768, 32768, 61), torch.arange(-300, 300)]).to(torch.int16).to(device)
    x = bits.view(dtype)
    x = x[~x.isnan()]
    a, b = x[:, None].expand(-1, len(x)), x[None].expand(len(x), -1)
    result = transpose_add(a.contiguous().t(), b.contiguous(), 1.0, 0, [0, 1])
    expected = (a.float().t() + b.float()).to(dtype)
    both = result.isnan() & expected.isnan()
    assert torch.equal(result.masked_fill(both, 0).view(torch.int16), expected.masked_fill(both, 0).view(torch.int16))


def test_integers_wrap(device):
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        x = torch.full((50, 30), info.max, dtype=dtype, device=device)
        check(x.t(), torch.full((30, 50), info.max - 3, dtype=dtype, device=device), 3, [0, 1])


@pytest.mark.parametrize(
    "shapes", [((40, 50), (50, 1)), ((40, 50), (1,)), ((40, 50), (40,)), ((40, 50), (3, 50, 40)), ((1, 50), (50, 40))], ids=str
)
def test_broadcast_operands(device, shapes):
    x, y = (values(s, torch.float32, device) for s in shapes)
    rank = max(x.dim(), y.dim())
    check(x.t(), y, 2, list(range(rank)))
    check(y, x.t(), 2, list(reversed(range(rank))))


def test_empty(device):
    assert transpose_add(values((0, 3), torch.float32, device).t(), values((3, 0), torch.float32, device), 1.0, 0, [0, 1]).shape == (3, 0)


def test_refusals(device):
    x = values((4, 5), torch.float32, device)
    with pytest.raises(RuntimeError, match="one dtype"):
        transpose_add(x, x.double(), 1.0, 0, [0, 1])
    with pytest.raises(RuntimeError, match="broadcast"):
        transpose_add(x, x.t(), 1.0, 0, [0, 1])
    with pytest.raises(RuntimeError, match="dtype"):
        transpose_add(x.bool(), x.bool(), 1.0, 0, [0, 1])


SAMPLES = [
    ((5, 7), (5, 7), [0, 1]),
    ((5, 7), (5, 7), [1, 0]),
    ((3, 5, 7), (5, 7), [2, 0, 1]),
    ((5, 1), (1, 7), [1, 0]),
    ((0, 4), (0, 4), [0, 1]),
    ((), (), []),
]


@pytest.mark.parametrize(("x_shape", "y_shape", "order"), SAMPLES)
def test_opcheck(device, x_shape, y_shape, order):
    x, y = (values(s, device=device) for s in (x_shape, y_shape))
    torch.library.opcheck(transpose_add, (x, y, 1.5, 0, order))


@pytest.mark.parametrize(("x_shape", "y_shape", "order"), SAMPLES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_the_operator_equals_its_reference(device, x_shape, y_shape, order, dtype):
    x, y = values(x_shape, dtype=dtype, device=device), values(y_shape, dtype=dtype, device=device)
    got, expected = (f(x, y, 1.5, 3, order) for f in (transpose_add, reference))
    assert torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(2, 3), torch.ones(2, 3).double(), 1.0, 0, [0, 1]), "dtype"),
        ((torch.ones(2, 3), torch.ones(2, 4), 1.0, 0, [0, 1]), "shape|size|broadcast"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, 0, [0, 0]), "order"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, 0, [0]), "order"),
        ((torch.ones(2, 3).to(torch.complex64), torch.ones(2, 3).to(torch.complex64), 1.0, 0, [0, 1]), "dtype"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(RuntimeError, match=words):
        transpose_add(*arguments)


@pytest.mark.cuda
@pytest.mark.usefixtures("large_memory")
def test_more_than_two_to_the_31_elements_of_a_square():
    x = torch.randint(-100, 100, (46400, 46400), dtype=torch.int8, device="cuda")
    y = torch.randint(-100, 100, (46400, 46400), dtype=torch.int8, device="cuda")
    out = transpose_add(x.t(), y, 1.0, 1, [0, 1])
    assert torch.equal(out, x.t() + y)


@pytest.mark.cuda
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("rows", [65, 3])
@pytest.mark.usefixtures("large_memory")
def test_operands_of_more_than_two_to_the_32_bytes(rows, order):
    """Whole pages, so that one byte read behind an operand would be a fault; with 3 rows, runs of more than 2**31 bytes. In the order of
    ``x.t()``, which is what ``x.t() + y`` has, the whole result is one run."""
    columns = (1 << 33) // rows // 8 // 4096 * 4096
    x = torch.randn(columns, rows, dtype=torch.float64, device="cuda")
    y = torch.randn(rows, columns, dtype=torch.float64, device="cuda")
    result = transpose_add(x.t(), y, 1.0, 1, order)
    for i in range(rows):
        assert torch.equal(result[i], x[:, i] + y[i])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape, permutation", [((1 << 16, (1 << 15) + 5), (1, 0)), ((2, 1 << 15, (1 << 15) + 3), (0, 2, 1)), (((1 << 31) + 40, 3), (1, 0))]
)
@pytest.mark.usefixtures("large_memory")
def test_more_than_two_to_the_31_elements(shape, permutation, dtype):
    x = torch.empty(shape, dtype=torch.int8, device="cuda").random_(-100, 100).to(dtype).permute(permutation)
    y = torch.empty(x.shape, dtype=torch.int8, device="cuda").random_(-100, 100).to(dtype)
    result = transpose_add(x, y, 3.0, 3, list(range(x.dim())))
    assert result.is_contiguous() and result.numel() > 2**31
    longest = max(range(x.dim()), key=lambda d: x.shape[d])
    for parts in zip(*(t.split(max(1, (1 << 29) * x.shape[longest] // x.numel()), dim=longest) for t in (result, x, y))):
        assert_same_bits(parts[0].contiguous(), torch.add(parts[1].contiguous(), parts[2].contiguous(), alpha=3))
