"""Matrix products of operands that were copied into the order that a library reads: where they lie, read from the graph."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.producers import Tensors
from fusebackend.patterns.strided_bmm.layout import Layout, Strided, begins_with_whole_vectors, layout_of
from fusebackend.rewriting.pattern import Emitter, Reject
from fusebackend.rewriting.view_dims import FOLLOWED

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of ``aten.bmm``, a batch of matrices.

    Attributes:
        source: the node that is read.
        copied: the clone behind which ``source`` stands, then the views of it up to the operand; empty if ``source`` is the operand.
        unread: what was copied, if the kernels do not read it as it lies, or it is not known how it does: ``source`` is the operand then.
        groups: for each of the operand's three dims the axes of ``source`` that it runs along, as (axis, size, stride), outermost first.
    """

    source: fx.Node
    copied: tuple[fx.Node, ...]
    groups: tuple[tuple[tuple[int, int, int], ...], ...]
    unread: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Site:
    """``aten.bmm``, and how ``strided_bmm`` computes it.

    Attributes:
        node: the call.
        operands: both.
        strided: the same as the operator's.
        shapes: of each source, with the axes apart that ``strided`` has apart.
        layout: how the operator computes it.
    """

    node: fx.Node
    operands: tuple[Operand, Operand]
    strided: tuple[Strided, Strided]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    layout: Layout

    @functools.cached_property
    def interior(self) -> tuple[fx.Node, ...]:
        """The copies that go, with their views: this product alone reads them, and Inductor does not compute there what it copies."""
        inside = {self.node}
        for operand in self.operands:
            if operand.copied and not _is_computed_there(operand):
                inside.update(operand.copied)
        kept: set[fx.Node] = set()
        for node in sorted(inside - {self.node}, reverse=True):
            if not all(user in inside and user not in kept for user in node.users):
                kept.add(node)
        return tuple(sorted(inside - kept - {self.node}))

    @property
    def copies(self) -> tuple[fx.Node, ...]:
        """Those of ``interior``."""
        return tuple(node for node in self.interior if node.target is aten.clone.default)

    def emit(self, emitter: Emitter) -> fx.Node:
        sources = []
        for operand, shape in zip(self.operands, self.shapes):
            same = list(shape) == list(g.value(operand.source).shape)
            sources.append(operand.source if same else emitter.call(aten.reshape.default, operand.source, list(shape)))
        product = self.layout.emit(emitter, *sources, self.strided)
        return emitter.call(aten.reshape.default, product, list(g.value(self.node).shape))


def read(node: fx.Node) -> Site | Reject | None:
    """The product at ``node``, an ``aten.bmm`` of static sizes, if an operand was copied for it; why the kernels do not read it where it
    lies; None if none was copied."""
    x, y = (_read_operand(operand) for operand in node.args[:2])  # type: ignore[arg-type]
    if not x.copied and not y.copied:
        unread = x.unread or y.unread
        if unread is None:
            return None
        return Reject("what was copied is not known to begin at a multiple of 16 bytes, or a reshape divides its dims", unread)
    misaligned = next((operand.source for operand in (x, y) if not begins_with_whole_vectors(g.value(operand.source))), None)
    if misaligned is not None:
        return Reject("an operand is not known to begin at a multiple of 16 bytes", misaligned)
    y = dataclasses.replace(y, groups=(y.groups[0], y.groups[2], y.groups[1]))  # batch, columns, terms
    aligned = [_with_sizes(*pair) for pair in zip(x.groups, y.groups)]
    if aligned[0] is None or aligned[2] is None:
        return Reject("the dims of the batch, or of the terms, are merged from others in one operand than in the other", node)
    batches, terms = aligned[0], aligned[2]
    groups = [(batches[0], x.groups[1], terms[0]), (batches[1], y.groups[1], terms[1])]
    counts = [len(batches[0]), len(x.groups[1]), len(y.groups[1]), len(terms[0])]
    batch, rows, columns, summed = ([*range(sum(counts[:i]), sum(counts[: i + 1]))] for i in range(4))
    found = [_strided(operand, own, (batch, free, summed)) for operand, own, free in zip((x, y), groups, (rows, columns))]
    sizes = {d: size for own, free in zip(groups, (rows, columns)) for d, (_, size, _) in zip((*batch, *free, *summed), sum(own, ()))}
    strided = found[0][0], found[1][0]
    layout = layout_of(strided, sizes, batch, summed, [*batch, *rows, *columns], g.value(node).dtype)
    if isinstance(layout, str):
        return Reject(layout, node)
    if layout.swapped:
        return Reject("a product with one column", node)
    return Site(node, (x, y), strided, (found[0][1], found[1][1]), layout)


def is_copied(node: fx.Node) -> bool:
    """Whether ``node`` is a copy, or a view of one."""
    return _behind(node)[0].target is aten.clone.default


def _behind(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What the views that can be followed are of, and these, the last one first."""
    views, source = [], node
    while source.target in FOLLOWED and g.is_view(source):
        views.append(source)
        before = source.args[0]
        assert isinstance(before, fx.Node)
        source = before
    return source, views


def _read_operand(node: fx.Node) -> Operand:
    """``node`` seen through the views behind a copy; as it is if there is none, or what was copied can't be read as it lies."""
    source, views = _behind(node)
    copied = source.args[0] if source.target is aten.clone.default and g.mutation_between(source, node) is None else None
    if isinstance(copied, fx.Node) and begins_with_whole_vectors(g.value(copied)):
        value = g.value(copied)
        dims: list[list[int]] | None = [[d] if size != 1 else [] for d, size in enumerate(value.shape)]
        for view in reversed(views):
            dims = None if dims is None else FOLLOWED[view.target](view, dims)
        if dims is not None:
            return Operand(copied, (source, *reversed(views)), tuple(_runs(value, axes) for axes in dims))
    value = g.value(node)
    groups = tuple(_runs(value, [d] if size != 1 else []) for d, size in enumerate(value.shape))
    return Operand(node, (), groups, copied if isinstance(copied, fx.Node) else None)


def _is_computed_there(operand: Operand) -> bool:
    """Whether Inductor writes the copy where it computes what is copied: nothing else reads that, or it is no tensor of its own, and
    computed for each reader."""
    source = g.through_views(operand.source)
    if set(g.consumers(source)) == {operand.copied[0]}:
        return g.is_fusable(source)
    return not Tensors().is_one(source)


def _runs(value: torch.Tensor, axes: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    return tuple((axis, value.shape[axis], value.stride(axis)) for axis in axes)


_Group = tuple[tuple[int, int, int], ...]


def _with_sizes(x: _Group, y: _Group) -> tuple[_Group, _Group] | None:
    """Both groups with the same sizes: one that is a single axis is taken apart as the other is. None if they do not agree."""
    if len(x) == 1 and len(y) > 1:
        x = _apart(x[0], [size for _, size, _ in y])
    elif len(y) == 1 and len(x) > 1:
        y = _apart(y[0], [size for _, size, _ in x])
    return (x, y) if [size for _, size, _ in x] == [size for _, size, _ in y] else None


def _apart(run: tuple[int, int, int], sizes: Sequence[int]) -> _Group:
    axis, size, stride = run
    if math.prod(sizes) != size:
        return (run,)
    return tuple((axis, n, stride * math.prod(sizes[i + 1 :])) for i, n in enumerate(sizes))


def _strided(operand: Operand, groups: Sequence[_Group], dims: Sequence[Sequence[int]]) -> tuple[Strided, tuple[int, ...]]:
    """The operand as the operator's, and its source's shape with the axes apart that ``groups`` have apart."""
    runs = [(axis, size, stride, d) for group, own in zip(groups, dims) for (axis, size, stride), d in zip(group, own)]
    shape: list[int] = []
    axes: dict[int, int] = {}
    for axis, whole in enumerate(g.value(operand.source).shape):
        own = [(size, d) for a, size, _, d in runs if a == axis]
        for size, d in own:
            axes[d] = len(shape)
            shape.append(size)
        if not own:
            shape.append(whole)
    return Strided(axes, {d: stride for _, _, stride, d in runs}), tuple(shape)
