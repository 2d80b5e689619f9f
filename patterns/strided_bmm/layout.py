"""Products of tensors with any dims in any order as one of four dims each: an outer batch, an inner batch, rows and terms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.strided_bmm.ops import ALIGNED_BYTES, plan_facts, refusal, strided_bmm
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Strided:
    """An operand.

    Attributes:
        axes: for each dim of the product that it has, its axis.
        strides: for each of these dims.
    """

    axes: Mapping[int, int]
    strides: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ``strided_bmm`` computes a product.

    Attributes:
        outer, batch, rows, columns, terms: the product's dims along each dim of the operator, outermost first. ``rows`` are those of
            its first operand.
        swapped: whether its first operand is the product's second.
        sizes: of outer, batch, rows, columns and terms.
        x_strides, y_strides: of its operands.
        order: of the result's memory.
        dtype: of the elements.
    """

    outer: Dims
    batch: Dims
    rows: Dims
    columns: Dims
    terms: Dims
    swapped: bool
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @property
    def result_dims(self) -> Dims:
        """The product's dims along those of the result, once these are taken apart."""
        return (*self.outer, *self.batch, *self.rows, *self.columns)

    @property
    def is_batch_innermost(self) -> bool:
        """Whether neighbours in the result's memory are entries of the batch."""
        return self.order[-1] == 1

    @property
    def plan(self) -> Mapping[str, float]:
        """What a block computes (:func:`fusebackend.patterns.strided_bmm.ops.plan_facts`)."""
        return plan_facts(self.sizes, self.x_strides, self.y_strides, self.order, self.dtype)

    def emit(self, emitter: Emitter, left: fx.Node, right: fx.Node, operands: tuple[Strided, Strided]) -> fx.Node:
        """The result, of outer, batch, rows and columns.

        Args:
            left, right: the product's operands, whose axes are those of ``operands``.
        """
        outer, batch, rows, columns, terms = self.sizes
        given = list(zip((left, right), operands))
        if self.swapped:
            given.reverse()
        nodes = []
        for (node, operand), free, size in zip(given, (self.rows, self.columns), (rows, columns)):
            axes = [operand.axes[d] for d in (*self.outer, *self.batch, *free, *self.terms)]
            axes = [*(axis for axis in range(g.value(node).dim()) if axis not in axes), *axes]  # others are of size 1
            if axes != list(range(len(axes))):
                node = emitter.call(aten.permute.default, node, axes)
            nodes.append(emitter.call(aten.reshape.default, node, [outer, batch, size, terms]))
        return emitter.call(strided_bmm, *nodes, list(self.order))


def begins_with_whole_vectors(value: torch.Tensor) -> bool:
    """Whether sizes, strides and offset of a tensor are no symbols, and its data begin where the kernels can read."""
    offset = value.storage_offset()
    is_known = all(isinstance(n, int) for n in (*value.shape, *value.stride(), offset))
    return is_known and offset * value.itemsize % ALIGNED_BYTES == 0


def layout_of(
    operands: tuple[Strided, Strided],
    sizes: Mapping[int, int],
    batch: Iterable[int],
    summed: Iterable[int],
    memory: Sequence[int],
    dtype: torch.dtype,
) -> Layout | str:
    """How the kernels compute a product, or why they do not.

    Args:
        operands: both.
        sizes: of each dim of the product.
        batch: the dims of both operands that the result has.
        summed: those that it has not.
        memory: the result's dims from the outermost to the innermost in memory, without gaps.
        dtype: of the elements.
    """
    x, y = operands
    batch, summed = set(batch), set(summed)
    free = [d for d in memory if d not in batch]
    if not free:
        return "a product with one row and one column"
    swapped = free[-1] in x.axes  # columns are the inner one of both free dims
    if swapped:
        x, y = y, x
    kept = [d for d in memory if d in batch]
    rows, columns = (tuple(d for d in memory if d in own.axes and d not in batch) for own in (x, y))
    terms = tuple(sorted(summed, key=lambda d: -x.strides[d]))
    reason, refused = "the batch's dims do not stand in the result's memory as two groups, beside rows and columns", ""
    for split in range(len(kept) + 1):
        groups = (tuple(kept[:split]), tuple(kept[split:]), rows, columns)
        order = sorted(range(4), key=lambda i: memory.index(groups[i][0]) if groups[i] else -1)
        if [d for i in order for d in groups[i]] != list(memory):
            continue
        strides = [_merged(own, (*groups[:2], free, terms), sizes) for own, free in ((x, rows), (y, columns))]
        if strides[0] is None or strides[1] is None:
            reason = "dims of an operand that the kernels take as one do not lie in memory as one"
            continue
        counts = tuple(math.prod(sizes[d] for d in dims) for dims in (*groups, terms))
        refused = refusal(counts, strides[0], strides[1], order, dtype)
        if not refused:
            return Layout(*groups, terms, swapped, counts, strides[0], strides[1], tuple(order), dtype)
    return f"the kernels do not compute {refused}" if refused else reason


def _merged(operand: Strided, groups: Iterable[Dims], sizes: Mapping[int, int]) -> tuple[int, ...] | None:
    """The strides of dims that are several each; None if some do not lie in memory as one."""
    found = []
    for dims in groups:
        pairs = zip(dims, dims[1:])
        if any(operand.strides[outer] != operand.strides[inner] * sizes[inner] for outer, inner in pairs):
            return None
        found.append(operand.strides[dims[-1]] if dims else 0)
    return tuple(found)
