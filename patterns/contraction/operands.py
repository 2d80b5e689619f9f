"""A factor as an operand of a matrix product: a view of its memory where there is one, else a copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.factors import Factor, Folded
from fusebackend.patterns.contraction.sites import Site
from fusebackend.rewriting.emitted_sizes import merged
from fusebackend.rewriting.pattern import Emitter

aten, prims = torch.ops.aten, torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Operand:
    """Matrices with the elements of a factor.

    Attributes:
        factor: whose elements they are.
        batch, rows, columns: the product's dims along each dim of the matrices, outermost first.
        dtype: of the elements.
        scalings: nodes of the graph that scale by a number what was multiplied: this factor is scaled instead.
    """

    factor: Factor | Folded
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    dtype: torch.dtype
    scalings: tuple[fx.Node, ...] = ()

    @property
    def in_memory(self) -> Factor | None:
        """The factor, if its elements lie in memory as they are multiplied; None if they are computed or converted first."""
        factor = self.factor
        if isinstance(factor, Folded) or factor.is_computed or factor.dtype != self.dtype or self.scalings:
            return None
        return factor

    @property
    def is_view(self) -> bool:
        """Whether BLAS can read the matrices where the factor lies: dims that become one are one in memory, and along rows or columns the
        elements are neighbours."""
        factor = self.in_memory
        if factor is None:
            return False
        strides = factor.value.stride()
        contiguous = any(g.same_size(strides[factor.axes[dims[-1]]], 1) for dims in (self.rows, self.columns))
        return contiguous and all(_are_one(factor, dims) for dims in (self.batch, self.rows, self.columns))

    @property
    def is_transposed(self) -> bool:
        """Whether the innermost dim in memory runs along the rows' index: such a factor is copied as it lies, and then transposed."""
        return max(self.rows, key=self.factor.axis_order) == max(self.factor.dims - set(self.batch), key=self.factor.axis_order)

    def emit(self, emitter: Emitter, before: fx.Node) -> fx.Node:
        """(batch, rows, columns), or (rows, columns) where there is no batch. A copy that another product made is used again, if it stands
        in the graph before ``before``."""
        groups = [self.batch, self.columns, self.rows] if self.is_transposed else [self.batch, self.rows, self.columns]
        order = [d for dims in groups for d in dims]
        if self.is_view:
            node = permuted(emitter, self.factor.emit(emitter), self.factor.emitted_axes(order))
        else:
            node = self.emit_copy(emitter, order, before)
        node = merged(emitter, node, [len(dims) for dims in groups if dims])
        if self.is_transposed:
            node = permuted(emitter, node, [0, 2, 1] if self.batch else [1, 0])
        return node

    def emit_copy(self, emitter: Emitter, order: Sequence[int], before: fx.Node) -> fx.Node:
        """The elements in memory of their own, with these dims from the outermost to the innermost."""
        node = self.factor.emit(emitter)
        if g.value(node).dtype != self.dtype:
            node = emitter.call(prims.convert_element_type.default, node, self.dtype)
        for scaling in self.scalings:
            node = emitter.call(scaling.target, node, *scaling.args[1:], **scaling.kwargs)
        return _copied(emitter, node, self.factor.emitted_axes(order), before)


def _copied(emitter: Emitter, node: fx.Node, order: list[int], before: fx.Node) -> fx.Node:
    """``node`` with its dims in this order, contiguous: a new copy, or one of the same elements that is in the graph."""
    value, root = g.value(node), g.through_views(node)
    with value.fake_mode:
        wanted = value.permute(order)
    for copy in node.graph.find_nodes(op="call_function", target=aten.clone.default):
        if not copy < before:
            break
        if _is_copy_of(copy, root, wanted) and g.mutation_between(copy, before) is None:
            return copy
    return emitter.call(aten.clone.default, permuted(emitter, node, order), memory_format=torch.contiguous_format)


def _is_copy_of(copy: fx.Node, root: fx.Node, wanted: torch.Tensor) -> bool:
    """Whether the clone ``copy`` is a contiguous one of the elements of ``wanted``, which is a view of ``root``."""
    source = copy.args[0]
    assert isinstance(source, fx.Node)
    contiguous = copy.kwargs.get("memory_format") is torch.contiguous_format
    found = g.value(source)
    same = g.through_views(source) is root and g.share_storage(found, wanted) and g.difference(found, wanted) is None
    return contiguous and same


def _are_one(factor: Factor, dims: Sequence[int]) -> bool:
    """Whether these dims are known to lie in memory as one."""
    axes = [factor.axes[d] for d in dims]
    shape, strides = factor.value.shape, factor.value.stride()
    return all(g.same_size(strides[outer], strides[inner] * shape[inner]) for outer, inner in zip(axes, axes[1:]))


def operands(site: Site) -> tuple[Operand, Operand]:
    """The two operands of the matrix product that ``site`` is. The smaller one is scaled by what scales no result."""
    sizes = [0, 1] if site.sizes is None else [site.count(factor.dims) for factor in (site.x, site.y)]
    scalings = () if site.scales_result else site.scalings
    left, right = (scalings, ()) if sizes[0] <= sizes[1] else ((), scalings)
    batch = (*site.batch, *site.chunked)
    return (
        Operand(site.x, batch, site.free_x, site.summed, site.dtype, left),
        Operand(site.y, batch, site.summed, site.free_y, site.dtype, right),
    )


def is_in_order(site: Site) -> bool:
    """Whether the matrix product's result is the sum's as it lies."""
    return [d for dims in site.result_dims for d in dims] == [*site.batch, *site.free_x, *site.free_y]


def permuted(emitter: Emitter, node: fx.Node, order: list[int]) -> fx.Node:
    return node if order == list(range(len(order))) else emitter.call(aten.permute.default, node, order)
