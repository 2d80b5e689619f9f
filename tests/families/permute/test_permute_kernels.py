"""permute_copy moves bits: every dtype, order, stride and alignment, and nothing else changes."""

import itertools
import math
import random

import pytest
import torch
from families.tile_tensors import MOVABLE, assert_same_bits, random_shape, strided, values

from fusebackend.bench import case_lists
from fusebackend.patterns.permute import bench
from fusebackend.patterns.permute.ops import permute_copy, reference

pytestmark = pytest.mark.usefixtures("library")


def check(x, order):
    assert_same_bits(permute_copy(x, order), reference(x, order))


@pytest.mark.parametrize("seed", range(14))
def test_random_views_are_copied_bitwise(device, seed):
    rng = random.Random(seed)
    for _ in range(150):
        shape = random_shape(rng)
        order = list(range(len(shape)))
        rng.shuffle(order)
        check(strided(rng, shape, rng.choice(MOVABLE), device, expand=rng.random() < 0.2), order)


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_every_order_of_every_dtype(device, dtype):
    for shape in [(6, 20, 35), (3, 64, 8, 16), (5, 7, 3, 9)]:
        x = values(shape, dtype, device)
        for permutation in itertools.permutations(range(len(shape))):
            check(x.permute(permutation), list(range(len(shape))))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64, torch.complex128], ids=str)
def test_sizes_around_tiles_and_chunks(device, dtype):
    for rows, columns in itertools.product([1, 2, 15, 16, 17, 63, 64, 65, 127, 129], [1, 3, 31, 33, 127, 128, 130]):
        check(values((2, rows, columns), dtype, device).transpose(1, 2), [0, 1, 2])


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize(
    "shape, permutation, dtype",
    [
        ((46, 7, 1327), (2, 1, 0), torch.float16),
        ((46, 70, 1320), (2, 1, 0), torch.float16),
        ((9, 49, 88, 4, 30), (3, 0, 4, 2, 1), torch.float32),
        ((41, 3, 55, 600), (1, 3, 0, 2), torch.float16),
        ((2, 3, 110, 24, 576), (4, 0, 1, 3, 2), torch.float16),
        ((189, 16, 500), (2, 1, 0), torch.int8),
        ((21, 5, 9, 300), (3, 2, 1, 0), torch.float64),
    ],
    ids=str,
)
def test_short_rows_that_end_within_sectors(device, shape, permutation, dtype, offset):
    """Boxes of several rows of the result, cut at sectors: some elements in front of each, and none beyond the ends."""
    x = values((*shape[:-1], shape[-1] + offset), dtype, device)[..., offset:]
    check(x.permute(permutation), list(range(len(shape))))


def test_every_alignment_of_both_sides(device):
    for offset, pitch in itertools.product(range(9), [128, 129, 130, 132, 136]):
        storage = values((pitch * 200 + 16,), torch.float16, device)
        x = storage.as_strided((100, 121), (pitch, 1), offset)
        check(x.t(), [0, 1])


@pytest.mark.parametrize(
    "dtype, shape, permutation",
    [
        (torch.float16, (300, 60, 32), (0, 2, 1)),
        (torch.float16, (100, 191, 80), (0, 2, 1)),
        (torch.float16, (8, 12, 96, 256), (2, 3, 1, 0)),
        (torch.float16, (13, 4, 96, 2, 154), (2, 4, 0, 1, 3)),
        (torch.float16, (9, 5, 448, 8, 4), (0, 2, 4, 1, 3)),
        (torch.float32, (5, 14, 5000), (2, 1, 0)),
        (torch.int64, (280, 2, 49, 24), (0, 1, 3, 2)),
        (torch.int8, (90, 100, 64), (0, 2, 1)),
    ],
    ids=str,
)
def test_boxes_whose_lanes_would_meet_few_banks(device, dtype, shape, permutation):
    """Their chunks are permuted within lines of shared memory; at every alignment of the input."""
    order = list(range(len(shape)))
    for offset, more in ((0, 0), (1, 0), (7, 0), (0, 1), (3, 5), (16, 16)):
        storage = values((math.prod(shape[:-1]) * (shape[-1] + more) + 32,), dtype, device)
        padded = storage[offset : offset + math.prod(shape[:-1]) * (shape[-1] + more)].view(*shape[:-1], shape[-1] + more)
        check(padded[..., : shape[-1]].permute(permutation), order)


def test_nan_payloads_survive(device):
    bits = torch.randint(-(2**31), 2**31 - 1, (300, 200), device=device).to(torch.int32) | 0x7F800000
    result = permute_copy(bits.view(torch.float32).t(), [0, 1])
    assert torch.equal(result.view(torch.int32), bits.t().contiguous())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int16], ids=str)
def test_elements_less_aligned_than_their_size(dtype):
    """As views of files have them."""
    buffer = bytearray(random.Random(0).randbytes(51 * 20 * 16 + 16))
    for offset in (1, 2, 4, 8):
        x = torch.frombuffer(buffer, dtype=dtype, count=51 * 20, offset=offset).view(51, 20)
        check(x.t(), [0, 1])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1, 1, 1), (1,)], ids=str)
def test_empty_scalar_and_unit_shapes(device, shape):
    x = values(shape, torch.float32, device)
    check(x.permute(tuple(reversed(range(x.dim())))), list(range(x.dim())))


def test_expanded_inputs(device):
    check(values((40, 1, 30), torch.float32, device).expand(40, 7, 30).permute(2, 1, 0), [0, 1, 2])
    check(values((1,), torch.int8, device).expand(100, 3), [1, 0])


def test_rank_sixteen(device):
    order = list(range(16))
    random.Random(0).shuffle(order)
    check(values((2,) * 16, torch.int16, device).permute(order), list(range(16)))


def test_wrong_orders_are_refused(device):
    x = values((2, 3), torch.float32, device)
    for order in ([0], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(RuntimeError, match="order must"):
            permute_copy(x, order)


SAMPLES = [((5, 7), [0, 1]), ((5, 7), [1, 0]), ((3, 5, 7), [2, 0, 1]), ((5, 1, 4), [1, 0, 2]), ((0, 4), [0, 1]), ((), [])]


@pytest.mark.parametrize(("shape", "order"), SAMPLES)
def test_opcheck(device, shape, order):
    torch.library.opcheck(permute_copy, (torch.randn(shape, device=device), order))


@pytest.mark.parametrize("dtype", [*MOVABLE, torch.float8_e4m3fn], ids=str)
def test_the_operator_equals_its_reference(device, dtype):
    x = values((3, 20, 17), dtype=dtype, device=device)
    for permutation in itertools.permutations(range(3)):
        got, expected = (f(x.permute(permutation), [0, 1, 2]) for f in (permute_copy, reference))
        assert got.stride() == expected.stride() and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_random_shapes_are_as_announced():
    scale = 1.0 if torch.cuda.is_available() else case_lists.CPU_SCALE
    for case in case_lists.random_cases("permute", 20, seed=3):
        (x,) = case.inputs(torch.device("meta"))
        copy = case.fn(x)
        assert 2 <= x.dim() <= 5 and copy.is_contiguous() and scale * 2**16 <= copy.nbytes <= scale * 2**30


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape, permutation", [((2, 1 << 15, (1 << 15) + 3), (0, 2, 1)), (((1 << 31) + 40, 3), (1, 0)), ((3, (1 << 30) + 9), (1, 0))]
)
@pytest.mark.usefixtures("large_memory")
def test_more_than_two_to_the_31_elements(shape, permutation):
    x = torch.empty(shape, dtype=torch.uint8, device="cuda").random_()
    result = permute_copy(x.permute(permutation), list(range(len(shape))))
    inverse = [permutation.index(d) for d in range(len(shape))]
    for part, expected in zip(
        result.permute(inverse).split(1 << 29, dim=shape.index(max(shape))), x.split(1 << 29, dim=shape.index(max(shape)))
    ):
        assert torch.equal(part, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(4))
def test_large_random_copies(seed):
    """Shapes of many blocks and of every kernel: those that the bench draws."""
    for case in itertools.islice(bench.random_cases(random.Random(100 + seed), 1.0), 25):
        call = case.peers["kernel"](*case.inputs(torch.device("cuda")))
        check(*call.args)


@pytest.mark.cuda
def test_graph_capture_and_side_stream():
    x = values((300, 200), torch.float32, torch.device("cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check(x.t(), [0, 1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = permute_copy(x.t(), [0, 1])
    x.normal_()
    graph.replay()
    assert_same_bits(result, x.t().contiguous())
