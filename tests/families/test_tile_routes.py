"""Each CUDA kernel of csrc/common/tile serves the problems that it is meant for, so that other tests run them all. Asking needs no GPU."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("library")


def route(x, y=None):
    shape = x.shape if y is None else torch.broadcast_shapes(x.shape, y.shape)
    return torch.ops.fusebackend.tile_route(x, y, list(range(len(shape))))


def half(*shape, device):
    return torch.zeros(shape, dtype=torch.float16, device=device)


@pytest.mark.parametrize(
    "shape, permutation, expected",
    [
        ((64, 1024, 1024), (0, 2, 1), "tiles"),
        ((7, 1001, 4097), (0, 2, 1), "tiles"),
        ((2, 1088, 80), (0, 2, 1), "tiles"),  # in part: columns of 128
        ((2, 1088, 81), (0, 2, 1), "boxes"),  # rows would have to be shifted
        ((2, 1088, 60), (0, 2, 1), "boxes"),
        ((256, 256, 1024), (1, 0, 2), "rows"),
        ((64, 8, 7, 8, 672), (0, 1, 3, 2, 4), "rows"),
        ((64, 64, 64, 4), (0, 2, 1, 3), "tiles"),  # four halves move as one element
        ((40, 512, 3), (0, 2, 1), "boxes"),
        ((40, 3, 512), (0, 2, 1), "boxes"),
        ((12, 34, 56, 7, 9), (4, 2, 0, 3, 1), "boxes"),
        ((50, 60, 33), (1, 0, 2), "boxes"),  # rows of 66 bytes
        ((50, 60, 701), (1, 0, 2), "boxes"),  # rows that are not whole chunks
        ((50, 60, 704), (1, 0, 2), "rows"),
        ((3, 0, 5), (2, 1, 0), "empty"),
        ((64, 64), (0, 1), "rows"),
    ],
    ids=str,
)
def test_copies(device, shape, permutation, expected):
    assert route(half(*shape, device=device).permute(permutation)) == expected


def test_adds(device):
    x, y = half(512, 384, device=device), half(384, 512, device=device)
    assert route(x.t(), y) == "tiles"
    assert route(y, x.t()) == "tiles"
    assert route(x.t(), half(512, 384, device=device).t()) == "tiles"
    assert route(y, y) == "rows"
    assert route(half(1000, 3, device=device).t(), half(3, 1000, device=device)) == "boxes"
    assert route(x[:, ::3].t(), half(128, 512, device=device)) == "tiles"
    assert route(y, half(512, device=device)) == "rows"


def test_unit_dimensions_do_not_matter(device):
    x = half(1, 512, 1, 384, 1, device=device)
    assert route(x.permute(4, 3, 2, 1, 0)) == route(half(512, 384, device=device).t()) == "tiles"
