"""Products of operands that a library would copy, by kernels that read them where they lie and write the result as the sum's lies."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.factors import Folded
from fusebackend.patterns.contraction.operands import Operand, is_in_order, operands
from fusebackend.patterns.contraction.sites import Site
from fusebackend.patterns.strided_bmm.layout import Layout, Strided, begins_with_whole_vectors, layout_of
from fusebackend.patterns.strided_bmm.ops import DTYPES, MOST_FP32_TERMS, unavailable
from fusebackend.rewriting.pattern import Emitter


@dataclasses.dataclass(frozen=True)
class InPlace:
    """A product by ``strided_bmm``."""

    operands: tuple[Operand, Operand]
    strided: tuple[Strided, Strided]
    layout: Layout

    def emit(self, emitter: Emitter) -> fx.Node:
        """The product, of ``layout.result_dims`` taken together."""
        left, right = (operand.factor.emit(emitter) for operand in self.operands)
        return self.layout.emit(emitter, left, right, self.strided)


def in_place(site: Site) -> InPlace | None:
    """The product at ``site`` by ``strided_bmm``, which needs no chunks; None if a library needs none either and reads and writes all as it
    lies, or if the kernels do not compute it."""
    is_divided, site = bool(site.chunked), site.undivided or site
    both, memory = operands(site), g.memory_order(g.value(site.node))
    if not is_divided and all(operand.is_view for operand in both) and is_in_order(site):
        return None
    if site.dtype not in DTYPES or site.sizes is None or site.repeated or memory is None or unavailable(site.device):
        return None
    if site.dtype == torch.float32 and site.count(site.summed) > MOST_FP32_TERMS:
        return None
    strided = [_strided(operand) for operand in both]
    if strided[0] is None or strided[1] is None:
        return None
    pair = strided[0], strided[1]
    dims = [d for axis in memory for d in site.result_dims[axis]]
    layout = layout_of(pair, dict(enumerate(site.sizes)), site.batch, site.summed, dims, site.dtype)
    return InPlace(both, pair, layout) if isinstance(layout, Layout) else None


def _strided(operand: Operand) -> Strided | None:
    """An operand that is in memory, of known sizes, in whole vectors; None if it is computed first, or is not known."""
    factor = operand.factor
    if isinstance(factor, Folded) or factor.is_computed or factor.dtype != operand.dtype or operand.scalings:
        return None
    value = factor.value
    if not begins_with_whole_vectors(value):
        return None
    emitted = factor.emitted_axes(list(factor.axes))
    return Strided(dict(zip(factor.axes, emitted)), {d: value.stride(axis) for d, axis in factor.axes.items()})
