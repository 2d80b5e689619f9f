"""For describing the work of a site (:class:`fusebackend.rewriting.pattern.Work`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Work

aten = torch.ops.aten

_LINE = 128  # bytes of a cache line
#: Elements a side of the tiles by which the thread blocks of a library's product are counted. It has many kernels; most have tiles between.
_LIBRARY_TILES = (64, 128)
_LONGEST_RUN = 8192  # bytes; longer runs are alike
#: Operators that read as many elements as they compute, from a tensor that may be much larger.
_READ_A_PART = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)


def log2(x: float) -> float:
    """log2, of at least 2**-20."""
    return math.log2(max(x, 2.0**-20))


def alignment(count: int) -> float:
    """log2 of the largest power of two up to 128, the bytes of a cache line, that divides it."""
    return math.log2(math.gcd(count, _LINE))


def log2_run(byte_count: float) -> float:
    """log2 of the bytes that lie one behind the other; those of long runs are alike."""
    return log2(min(byte_count, _LONGEST_RUN))


def library_tiles(batch: int, m: int, n: int, multiprocessors: int) -> Iterator[tuple[int, int, int]]:
    """For two kernels that a library may choose for a product of ``batch`` results of m by n: (elements a side of a tile, tiles, how many
    of them one multiprocessor computes one after the other)."""
    for side in _LIBRARY_TILES:
        tiles = batch * -(-m // side) * -(-n // side)
        yield side, tiles, -(-tiles // multiprocessors)


def stream(neighbour: fx.Node) -> Work:
    """A kernel of its own for a node that Inductor would have fused: elements are read and written once more, as many as the largest
    tensor has that it reads or computes (of a sum that is what it reads)."""
    read = [] if neighbour.target in _READ_A_PART else neighbour.all_input_nodes
    values = tree_leaves([g.value(neighbour), *map(g.value, read)])
    sizes = [(math.prod(g.hints(t.shape) or [1]) * t.itemsize, t) for t in values if isinstance(t, torch.Tensor)]
    size, largest = max(sizes, key=lambda pair: pair[0])
    return dataclasses.replace(streamed(2.0 * size, largest), around=True)


def streamed(byte_count: float, like: torch.Tensor) -> Work:
    """A pointwise kernel that reads and writes so many bytes, of tensors of the dtype and on the device of ``like``."""
    device = " cpu" if like.device.type == "cpu" else ""
    return Work(f"stream{device}", {"bytes": byte_count}, {"log2 itemsize": log2(like.itemsize)})
