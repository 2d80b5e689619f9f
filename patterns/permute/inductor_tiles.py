"""A model of the tiles in which Inductor's Triton kernel for static sizes copies.

A tile has 1024 elements: 32 along the result's inner dims, up to the one that is innermost in the source, by 32 along the others; or,
where those inner dims have few elements, all along the result.
"""

from __future__ import annotations

import dataclasses
import math

from fusebackend.patterns.permute.sites import Reordering

#: Bytes that a GPU's memory moves at once, and that its caches hold together.
SECTOR, CACHE_LINE = 32, 128


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile, and the plane that it is a part of.

    Attributes:
        outer, inner: the result's dims across and along the plane.
        plane_height, plane_width: elements of the plane, across and along.
        height, width: those of the tile.
    """

    outer: list[int]
    inner: list[int]
    plane_height: int
    plane_width: int
    height: int
    width: int

    @classmethod
    def of(cls, copy: Reordering) -> Tile:
        middle = copy.result_order.index(copy.source_order[-1]) + 1
        outer, inner = copy.result_order[:middle], copy.result_order[middle:]
        if math.prod(copy.sizes[d] for d in inner) <= 4:
            outer, inner = [], copy.result_order
        plane_height, plane_width = (math.prod(copy.sizes[d] for d in dims) for dims in (outer, inner))
        if not outer:
            return cls(outer, inner, plane_height, plane_width, 1, 1024)
        # Powers of two, no larger than the plane needs.
        max_height, max_width = (1 << (n - 1).bit_length() for n in (plane_height, plane_width))
        width = min(max_width, 1024 // min(32, max_height))
        return cls(outer, inner, plane_height, plane_width, min(max_height, 1024 // width), width)

    def sectors_read(self, copy: Reordering) -> int:
        """The sectors that hold the elements of a tile in the middle of its plane."""

        def offsets(dims: list[int], count: int) -> list[int]:
            total = math.prod(copy.sizes[d] for d in dims)
            first, found = total // count // 2 * count, []
            for index in range(first, min(first + count, total)):
                offset = 0
                for d in reversed(dims):
                    index, i = divmod(index, copy.sizes[d])
                    offset += i * copy.strides[d]
                found.append(offset)
            return found

        across, along = offsets(self.outer, self.height), offsets(self.inner, self.width)
        return len({(x + y) * copy.itemsize // SECTOR for x in along for y in across})
