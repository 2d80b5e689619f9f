"""Tensors that are computed element by element of others and of vectors that vary along the innermost dim, read from the graph: batch
norm's gradient, or its result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.computed_sums import expression
from fusebackend.patterns.computed_sums.expression import Expression, Unreadable, laid_out
from fusebackend.patterns.computed_sums.ops import MOST_ROWS, RESULTS, computed_rows
from fusebackend.patterns.computed_sums.reading import Reading
from fusebackend.rewriting.convolution_layout import gives_channels_last

aten, prims = torch.ops.aten, torch.ops.prims

#: What computes such a tensor last.
ENDS = (
    *(prims.convert_element_type.default, aten.where.self, aten.relu.default),
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor),
)

_CHANNELS_LAST = [0, 2, 3, 1]
_LEAST_VECTORS = 2  # with fewer Inductor's kernels are copies


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tensor that is computed element by element.

    Attributes:
        node: it.
        order: its dims in memory, outermost first.
        expression: how it is computed.
        vectors: how many tensors that vary along the innermost dim alone are read.
        is_relaid: whether ``order`` is Inductor's, and not that of the graph's strides.
    """

    node: fx.Node
    order: tuple[int, ...]
    expression: Expression
    vectors: int
    is_relaid: bool

    @functools.cached_property
    def reading(self) -> Reading:
        return Reading.of(self.expression, self.order, self.sizes, 0, len(self.order) - 1, self.is_relaid)

    @property
    def sizes(self) -> list[int]:
        """By hints, in memory order."""
        shape = g.value(self.node).shape
        return g.hints([shape[d] for d in self.order]) or []


def read(node: fx.Node) -> Rows | None:
    """What is computed at ``node``, if something reads it as a tensor; None if no program computes it, or too little of it varies by
    column: Inductor computes that at a copy's speed."""
    value = g.value(node)
    if not g.is_tensor(node) or value.dtype not in RESULTS or value.dim() < 2:
        return None
    if not expression.is_pointwise(node) or not expression.is_tensor_anyway(node):
        return None
    order, sizes = g.memory_order(value), g.hints(value.shape)
    if order is None or sizes is None or not _is_dense(value, order):
        return None
    try:
        found = expression.read([node], math.prod(sizes), stored=True)
    except Unreadable:
        return None
    is_relaid = _is_relaid(value, order, found)
    rows = Rows(node, tuple(_CHANNELS_LAST if is_relaid else order), found, 0, is_relaid)
    vectors = _vectors(rows)
    return dataclasses.replace(rows, vectors=vectors) if vectors is not None and vectors >= _LEAST_VECTORS else None


def _vectors(rows: Rows) -> int | None:
    """How many vectors by column are read; None if other tensors can't be read where they lie, or none has the full size."""
    domain, full, vectors = rows.sizes, 0, 0
    if domain[-1] == 1 or not 1 < math.prod(domain[:-1]) <= MOST_ROWS:  # of one row all are vectors
        return None
    for leaf in rows.expression.leaves:
        laid = laid_out(rows.order, leaf, rows.is_relaid)
        if laid is None:
            return None
        if expression.is_full(laid[0], math.prod(domain)):
            if not expression.collapses(tuple(laid[0]), tuple(laid[1]), tuple(domain)):
                return None
            full += list(laid[0]) == list(domain)
        vectors += laid[0][-1] > 1 and math.prod(laid[0][:-1]) == 1
    return vectors if full else None


def _is_relaid(value: torch.Tensor, order: Sequence[int], found: Expression) -> bool:
    """Whether Inductor lays out all that is read in full channels last, though the graph does not say so: results of convolutions, and what
    was computed of them here."""
    if list(order) != [0, 1, 2, 3] or not all(isinstance(n, int) for n in value.shape):
        return False
    full = [leaf for leaf in found.leaves if g.value(leaf.node).shape == value.shape]
    return bool(full) and all(not leaf.views and _gives_channels_last(leaf.node) for leaf in full)


def _gives_channels_last(node: fx.Node) -> bool:
    if node.target is aten.convolution.default:
        return gives_channels_last(node)
    made = g.through_views(node)
    return made.target is computed_rows and made.kwargs.get("keeps_order", False) is True


def _is_dense(value: torch.Tensor, order: list[int]) -> bool:
    step: int | torch.SymInt = 1
    for d in reversed(order):
        if not g.same_size(value.shape[d], 1) and not g.same_size(value.stride(d), step):
            return False
        step = step * value.shape[d]
    return True
