"""A copy into another memory order: its geometry, and what it makes a device do where its loops are not known further."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from fusebackend import fx_utils as g
from fusebackend.rewriting.workload import alignment, log2, log2_run


@dataclasses.dataclass(frozen=True)
class Reordering:
    """The geometry of a copy, without dims of size 1.

    Attributes:
        sizes: of the source.
        strides: of the source, in elements.
        itemsize: bytes of an element.
        source_order: the source's dims from outermost to innermost in memory.
        result_order: the copy's.
        static: whether no size and no stride is symbolic.
    """

    sizes: list[int]
    strides: list[int]
    itemsize: int
    source_order: list[int]
    result_order: list[int]
    static: bool

    @classmethod
    def of(cls, source: torch.Tensor, order: list[int]) -> Reordering | None:
        """That of a copy of ``source`` whose dims lie in memory in ``order``; None if a size or stride has no hint."""
        sizes, strides, source_order = g.hints(source.shape), g.hints(source.stride()), g.memory_order(source)
        if sizes is None or strides is None or source_order is None:
            return None
        before, after = ([d for d in o if sizes[d] != 1] for o in (source_order, order))
        static = all(isinstance(n, int) for n in (*source.shape, *source.stride()))
        return cls(sizes, strides, source.itemsize, before, after, static)

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @functools.cached_property
    def result_run(self) -> int:
        """Elements along the copy's inner dims that are one dim in the source too."""
        return g.run_length(self.sizes, self.result_order, self.source_order)

    @functools.cached_property
    def source_run(self) -> int:
        """Elements along the source's inner dims that are one dim in the copy too."""
        return g.run_length(self.sizes, self.source_order, self.result_order)

    @property
    def keeps_innermost_dim(self) -> bool:
        return self.source_order[-1] == self.result_order[-1]

    @functools.cached_property
    def merged_dims(self) -> int:
        """How many dims are left once those that stay side by side are one."""
        following = dict(zip(self.source_order, self.source_order[1:]))
        return 1 + sum(following.get(dim) != then for dim, then in zip(self.result_order, self.result_order[1:]))


def copy_geometry(copy: Reordering) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape of a copy, for loops whose ways are not known further."""
    elements = math.prod(copy.sizes)
    result_run, source_run = copy.result_run * copy.itemsize, copy.source_run * copy.itemsize
    inside = copy.source_order[copy.source_order.index(copy.result_order[-1]) + 1 :]
    quantities = {"bytes": 2.0 * copy.bytes, "elements": float(elements), "runs": elements / min(copy.result_run, copy.source_run)}
    shape = {
        "log2 itemsize": log2(copy.itemsize),
        "log2 result run": log2_run(result_run),
        "log2 source run": log2_run(source_run),
        "result alignment": alignment(result_run),
        "source alignment": alignment(source_run),
        "log2 step": log2(min(copy.strides[copy.result_order[-1]] * copy.itemsize, 1 << 24)),
        "log2 inside": log2(min(math.prod(copy.sizes[d] for d in inside), 1 << 14)),
        "merged dims": float(min(copy.merged_dims, 6)),
        "keeps innermost": float(copy.keeps_innermost_dim),
        "dynamic": float(not copy.static),
    }
    return quantities, shape
