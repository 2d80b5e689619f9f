"""Products of operands that a library would copy, by kernels that read them where they lie and write the result as the sum's lies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.operands import Operand, is_in_order, operands
from fusebackend.patterns.contraction.sites import Site
from fusebackend.patterns.strided_bmm.layout import Layout, Strided, begins_with_whole_vectors, layout_of
from fusebackend.patterns.strided_bmm.ops import ALIGNED_BYTES, DTYPES, MOST_FP32_TERMS, unavailable
from fusebackend.rewriting.pattern import Emitter


@dataclasses.dataclass(frozen=True)
class Given:
    """An operand of ``strided_bmm``: where its factor lies, or in a copy with the dims ``order``, outermost first."""

    operand: Operand
    strided: Strided
    order: tuple[int, ...] = ()

    @property
    def is_copied(self) -> bool:
        return bool(self.order)

    def emit(self, emitter: Emitter, before: fx.Node) -> fx.Node:
        return self.operand.emit_copy(emitter, self.order, before) if self.is_copied else self.operand.factor.emit(emitter)


@dataclasses.dataclass(frozen=True)
class InPlace:
    """A product by ``strided_bmm``."""

    given: tuple[Given, Given]
    layout: Layout

    def emit(self, emitter: Emitter, before: fx.Node) -> fx.Node:
        """The product, of ``layout.result_dims`` taken together."""
        left, right = (given.emit(emitter, before) for given in self.given)
        return self.layout.emit(emitter, left, right, (self.given[0].strided, self.given[1].strided))


def in_place(site: Site) -> InPlace | None:
    """The product at ``site`` by ``strided_bmm``; None if a library needs no copies and reads and writes all as it lies, or if the kernels
    do not compute it.

    The kernels need no chunks. Where a library does, an operand that they can't read where it lies is copied for them, too.
    """
    is_divided, site = bool(site.chunked), site.undivided or site
    both, memory = operands(site), g.memory_order(g.value(site.node))
    if not is_divided and all(operand.is_view for operand in both) and is_in_order(site):
        return None
    if site.dtype not in DTYPES or site.sizes is None or site.repeated or memory is None or unavailable(site.device):
        return None
    if site.dtype == torch.float32 and site.count(site.summed) > MOST_FP32_TERMS:
        return None
    dims = [d for axis in memory for d in site.result_dims[axis]]
    left, right = ((_where_it_lies(operand), _copied(operand, site, dims) if is_divided else None) for operand in both)
    for pair in itertools.product(left, right):
        if pair[0] is None or pair[1] is None:
            continue
        strided = pair[0].strided, pair[1].strided
        layout = layout_of(strided, dict(enumerate(site.sizes)), site.batch, site.summed, dims, site.dtype)
        if isinstance(layout, Layout):
            return InPlace((pair[0], pair[1]), layout)
    return None


def _where_it_lies(operand: Operand) -> Given | None:
    """An operand that is in memory, of known sizes, in whole vectors; None if it is computed first, or is not known."""
    factor = operand.in_memory
    if factor is None or not begins_with_whole_vectors(factor.value):
        return None
    emitted = factor.emitted_axes(list(factor.axes))
    return Given(operand, Strided(dict(zip(factor.axes, emitted)), {d: factor.value.stride(axis) for d, axis in factor.axes.items()}))


def _copied(operand: Operand, site: Site, memory: Sequence[int]) -> Given | None:
    """A copy of an operand of known sizes: the batch's dims outermost, and innermost the terms or the others, as the factor lies if these
    are whole vectors.

    Args:
        memory: the result's dims, outermost first.
    """
    if not all(isinstance(site.shape[d], int) for d in operand.factor.dims):
        return None
    inner, outer = (operand.rows, operand.columns) if operand.is_transposed else (operand.columns, operand.rows)
    vector = ALIGNED_BYTES // site.dtype.itemsize
    if site.count(inner) % vector and site.count(outer) % vector == 0:
        inner, outer = outer, inner
    groups = (sorted(dims, key=lambda d: memory.index(d) if d in memory else 0) for dims in (operand.batch, outer, inner))
    order = [d for dims in groups for d in dims]
    strides, step = {}, 1
    for d in reversed(order):
        strides[d] = step
        step *= site.count([d])
    return Given(operand, Strided({d: axis for axis, d in enumerate(order)}, strides), tuple(order))
