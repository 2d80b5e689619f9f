"""A factor of a product: which dims of the product it has, and where its memory is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.emitted_sizes import chunks_of, in_chunks_of, size_of
from fusebackend.rewriting.pattern import Emitter

aten, prims = torch.ops.aten, torch.ops.prims

#: By a number.
SCALINGS = frozenset({aten.div.Scalar, aten.div.Tensor, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default})
#: Computed element by element from their first argument alone. Where that is expanded, so is what they compute, though it was written out.
_ELEMENTWISE = SCALINGS | {aten.clone.default, prims.convert_element_type.default}
_MOVABLE_VIEWS = frozenset({aten.reshape.default, aten.view.default, aten.permute.default, aten.unsqueeze.default, aten.expand.default})


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim that is seen as two: ``dim``, along which chunks lie, and ``inner``, a dim of its own of ``length`` elements within a chunk."""

    dim: int
    length: int
    inner: int


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor, seen through what was written out of an expanded tensor: ``repeat_interleave`` (``expand``, ``clone``, ``reshape``), the
    gradient of a mean (``expand``, ``div``).

    Attributes:
        source: the node from which it is read.
        views: the nodes of the graph that are applied to ``source``, in this order.
        elementwise: the nodes of the graph that are applied element by element, in this order.
        value: the fake tensor of the views.
        dtype: of the factor.
        axes: for each dim of the product that this factor has, its axis. Along the rest it is broadcast.
        is_mask: whether all elements are known to be 0 or 1.
        split: a dim that is seen as two; ``value`` and ``axes`` have both.
    """

    source: fx.Node
    views: tuple[fx.Node, ...]
    elementwise: tuple[fx.Node, ...]
    value: torch.Tensor
    dtype: torch.dtype
    axes: dict[int, int]
    is_mask: bool = False
    split: Split | None = None

    @property
    def dims(self) -> set[int]:
        return set(self.axes)

    def divided(self, split: Split) -> Factor:
        """The same, with one of its dims seen as two: its size is a multiple of the chunk's."""
        at = self.axes[split.dim]
        axes = {dim: axis + (axis > at) for dim, axis in self.axes.items()} | {split.inner: at + 1}
        with self.value.fake_mode:
            value = self.value.unflatten(at, (self.value.shape[at] // split.length, split.length))
        return dataclasses.replace(self, value=value, axes=axes, split=split)

    @property
    def _axes_in_graph(self) -> dict[int, int]:
        """``axes`` before a dim is seen as two."""
        if self.split is None:
            return self.axes
        at = self.axes[self.split.dim]
        return {dim: axis - (axis > at) for dim, axis in self.axes.items() if dim != self.split.inner}

    @property
    def is_computed(self) -> bool:
        """Whether it is not in memory but for what is computed of it."""
        return any(step.target is not aten.clone.default for step in self.elementwise)

    def size(self, emitter: Emitter, dim: int) -> fx.Node:
        """The size of a dim of symbolic size. (Views are left out only where sizes are static.)"""
        return emitter.call(aten.sym_size.int, self.source, self._axes_in_graph[dim])

    def axis_order(self, dim: int) -> int:
        """Sorts dims from outermost to innermost in memory."""
        order = g.memory_order(self.value)
        return self.axes[dim] if order is None else order.index(self.axes[dim])

    def emit(self, emitter: Emitter) -> fx.Node:
        """This factor without its broadcast axes; the axes that are left keep their order."""
        node = self.source
        for view in self.views:
            node = emitter.call(view.target, node, *view.args[1:], **view.kwargs)
        axes = sorted(self._axes_in_graph.values())
        for axis in sorted(set(range(g.value(node).dim())) - set(axes), reverse=True):
            node = emitter.call(aten.select.int, node, axis, 0)
        for step in self.elementwise:
            if step.target is not aten.clone.default:
                node = emitter.call(step.target, node, *step.args[1:], **step.kwargs)
        if self.split is not None:
            at = axes.index(self._axes_in_graph[self.split.dim])
            sizes = [size_of(emitter, node, axis) for axis in range(len(axes))]
            sizes[at : at + 1] = [sizes[at] // self.split.length, self.split.length]
            node = emitter.call(aten.reshape.default, node, sizes)
        return node

    def emitted_axes(self, dims: Sequence[int]) -> list[int]:
        """The axes of what ``emit`` returns that run along ``dims``."""
        left = sorted(self.axes.values())
        return [left.index(self.axes[d]) for d in dims]


@dataclasses.dataclass(frozen=True)
class Folded:
    """Factors that are multiplied element by element first, and are one factor then; or one that is padded.

    Attributes:
        parts: these factors.
        dtype: in which they are multiplied, that of the graph's products: theirs may be narrower.
        padded: a dim that is seen as two, and is no multiple of the chunk's length: zeros are put behind it. Behind that of the product:
            a part's zeros would be multiplied by what another part holds, which may be infinite.
    """

    parts: tuple[Factor, ...]
    dtype: torch.dtype
    padded: Split | None = None

    @property
    def is_exact(self) -> bool:
        """Whether these may be multiplied first, whatever they hold: a product that the graph does not compute may overflow, or vanish,
        where those that it computes do not. Nothing overflows that a mask is multiplied to first, though the graph's own product may."""
        return sum(not part.is_mask for part in self.parts) <= 1

    @property
    def dims(self) -> set[int]:
        return set(self._emitted_dims)

    @property
    def _emitted_dims(self) -> list[int]:
        """As what ``emit`` returns has them: those of the parts in the product's order, and behind one that is padded its inner part."""
        dims = sorted(set[int]().union(*(part.dims for part in self.parts)))
        if self.padded is not None:
            dims.insert(dims.index(self.padded.dim) + 1, self.padded.inner)
        return dims

    @property
    def is_computed(self) -> bool:
        return True

    def size(self, emitter: Emitter, dim: int) -> fx.Node:
        size = next(part for part in self.parts if dim in part.dims).size(emitter, dim)
        return size if self.padded is None or dim != self.padded.dim else chunks_of(emitter, size, self.padded.length)

    def axis_order(self, dim: int) -> int:
        if self.padded is not None and dim == self.padded.inner:
            dim = self.padded.dim
        largest = max(self.parts, key=lambda part: len(part.dims))
        return largest.axis_order(dim) if dim in largest.dims else -1

    def emit(self, emitter: Emitter) -> fx.Node:
        dims, product = [d for d in self._emitted_dims if self.padded is None or d != self.padded.inner], None
        for part in self.parts:
            node = part.emit(emitter)
            if g.value(node).dtype != self.dtype:
                node = emitter.call(prims.convert_element_type.default, node, self.dtype)
            held = sorted(part.dims, key=lambda d: part.axes[d])
            order = [held.index(d) for d in sorted(held)]
            if order != sorted(order):
                node = emitter.call(aten.permute.default, node, order)
            for i, d in enumerate(dims):
                if d not in part.dims and held:  # a tensor without dims may be on another device, and must stay one
                    node = emitter.call(aten.unsqueeze.default, node, i)
            product = node if product is None else emitter.call(aten.mul.Tensor, product, node)
        assert product is not None
        return product if self.padded is None else in_chunks_of(emitter, product, dims.index(self.padded.dim), self.padded.length)

    def emitted_axes(self, dims: Sequence[int]) -> list[int]:
        held = self._emitted_dims
        return [held.index(d) for d in dims]


def read_factor(node: fx.Node, shape: Sequence) -> Factor | None:
    """The factor ``node`` of a product of that shape; None if it is not known along which dims it is broadcast."""
    source, views, elementwise, value = _without_repetition(node)
    axes, leading = {}, len(shape) - value.dim()
    for axis, (size, stride) in enumerate(zip(value.shape, value.stride())):
        dim = axis + leading
        if same_as_one(shape[dim]) or same_as_one(size) or g.same_size(stride, 0):
            continue
        if not g.same_size(size, shape[dim]):
            return None
        axes[dim] = axis
    return Factor(source, views, elementwise, value, g.value(node).dtype, axes, _is_mask(node))


def _is_mask(node: fx.Node) -> bool:
    """Whether ``node`` is bool, or was converted from that."""
    while g.value(node).dtype != torch.bool:
        copied = node.target in (aten.clone.default, prims.convert_element_type.default)
        if not copied and node.target not in _MOVABLE_VIEWS:
            return False
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return True


def same_as_one(size: int | torch.SymInt) -> bool:
    return g.same_size(size, 1)


def is_scaling(node: fx.Node) -> bool:
    """Whether ``node`` scales a tensor by a number, and does not change its dtype."""
    if node.target not in SCALINGS or not g.is_tensor(node.args[0]) or g.value(node.args[0]).dtype != g.value(node).dtype:
        return False
    return all(isinstance(a, (int, float)) for a in (*node.args[1:], *node.kwargs.values()))


def number_of(scaling: fx.Node) -> float:
    """By what ``scaling`` multiplies."""
    if scaling.target is aten.neg.default:
        return -1.0
    number: Any = scaling.args[1]
    return 1 / number if scaling.target in (aten.div.Tensor, aten.div.Scalar) and number else float(number)


_Steps = tuple[fx.Node, ...]


def _without_repetition(node: fx.Node) -> tuple[fx.Node, _Steps, _Steps, torch.Tensor]:
    """Where ``node`` was written out of an expanded tensor: that tensor, and the views and the elementwise nodes from there to ``node``.

    Views that the expanded tensor does not have without a copy, and a mutation on the way, leave ``node`` as it is.
    """
    as_it_is = (node, (), (), g.value(node))
    views: list[fx.Node] = []
    elementwise: list[fx.Node] = []
    source = node
    while not (elementwise and _is_expanded(g.value(source))):
        if source.target in _ELEMENTWISE and (source.target not in SCALINGS or is_scaling(source)):
            elementwise.append(source)
        elif source.target in _MOVABLE_VIEWS:
            views.append(source)
        else:
            return as_it_is
        before = source.args[0]
        if not g.is_tensor(before):
            return as_it_is
        assert isinstance(before, fx.Node)
        source = before
    value = g.value(source)
    for view in reversed(views):
        if not _is_static(value) or not _is_static(g.value(view)):
            return as_it_is
        with value.fake_mode:
            value = view.target(value, *view.args[1:], **view.kwargs)
        if not g.share_storage(value, g.value(source)):
            return as_it_is
    if g.mutation_between(source, node) is not None:
        return as_it_is
    return source, tuple(reversed(views)), tuple(reversed(elementwise)), value


def _is_expanded(value: torch.Tensor) -> bool:
    return any(g.same_size(stride, 0) and not same_as_one(size) for size, stride in zip(value.shape, value.stride()))


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))
