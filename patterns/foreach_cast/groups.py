"""Casts of a graph that Inductor makes by a kernel each, and which of them one kernel can make together.

Autocast rounds every weight before its product and widens every weight's gradient behind it. Libraries need, and leave, tensors there, so
Inductor can fuse these casts with nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import arguments
from fusebackend.patterns.foreach_cast.ops import CASTS

aten, prims = torch.ops.aten, torch.ops.prims

CAST = prims.convert_element_type.default

Kind = Literal["inputs", "results"]

#: Of the results of one call. Casts of inputs are there from the first one's place on, so that much more memory may be in use; but what is
#: cast shortly before a product reads it is in a GPU's cache then. Of results the sources, half as much, are kept up to the last place.
_MOST_BYTES: dict[Kind, int] = {"inputs": 16 << 20, "results": 64 << 20}
#: Of one call, as many as one launch takes (csrc/foreach_cast/foreach_cast.h).
_MOST_CASTS = 128

_KEPT = "_fusebackend_groups_of_casts"  # an attribute of a graph
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})


@dataclasses.dataclass(frozen=True)
class Group:
    """Casts that may be made at once.

    Attributes:
        kind: ``"inputs"``, of the graph's inputs, which are there before the first of the casts; or ``"results"``, which nothing but the
            graph's outputs reads.
        casts: at least two, in the graph's order.
    """

    kind: Kind
    casts: tuple[fx.Node, ...]

    @property
    def sources(self) -> list[fx.Node]:
        return [n.args[0] for n in self.casts]  # type: ignore[misc]

    @property
    def dtype(self) -> torch.dtype:
        return g.value(self.casts[0]).dtype

    def still_stands(self) -> bool:
        """Whether all casts are what they were: other substitutions change the graph."""
        return all(not n._erased and _kind(n) == self.kind for n in self.casts)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Those of a graph by their first casts, and how many nodes it had. Each of hundreds of casts asks for its group, so they are kept; by
    the graph, which they would keep alive elsewhere."""

    nodes: int
    by_first: dict[fx.Node, Group]


def group_of(cast: fx.Node) -> Group | None:
    """The group that begins with ``cast``; None if it is in the middle of one, or alone. Groups stay as they are while all their casts are
    there: others begin elsewhere if one of them goes."""
    graph = cast.graph
    kept: _Groups | None = vars(graph).get(_KEPT)
    found = None if kept is None else kept.by_first.get(cast)
    if found is not None and found.still_stands():
        return found
    if kept is None or found is not None or len(graph.nodes) != kept.nodes:
        kept = _Groups(len(graph.nodes), {group.casts[0]: group for group in _all_groups(graph)})
        vars(graph)[_KEPT] = kept
    return kept.by_first.get(cast)


def _all_groups(graph: fx.Graph) -> Iterator[Group]:
    """In the graph's order, none across a node that may write to memory, which no read may pass."""
    open_groups: dict[tuple, list[fx.Node]] = {}
    byte_counts: collections.Counter[tuple] = collections.Counter()
    for node in graph.nodes:
        if g.is_mutating(node):
            for (kind, *_), members in open_groups.items():
                yield from _closed(kind, members)
            open_groups.clear()
            byte_counts.clear()
        kind = _kind(node) if node.op == "call_function" and node.target is CAST else None
        if kind is None:
            continue
        value, source = g.value(node), g.value(node.args[0])
        key = kind, source.dtype, value.dtype, value.device
        members = open_groups.setdefault(key, [])
        byte_counts[key] += value.nbytes
        if len(members) == _MOST_CASTS or byte_counts[key] > _MOST_BYTES[kind]:
            yield from _closed(kind, members)
            members.clear()
            byte_counts[key] = value.nbytes
        members.append(node)
    for (kind, *_), members in open_groups.items():
        yield from _closed(kind, members)


def _closed(kind: Kind, members: list[fx.Node]) -> Iterator[Group]:
    if len(members) > 1:
        yield Group(kind, tuple(members))


def _kind(cast: fx.Node) -> Kind | None:
    """Whether Inductor makes a kernel for a cast alone, and whence it may be moved; None if it does not, or if it may not be moved."""
    source = cast.args[0]
    if len(cast.args) != 2 or cast.kwargs or not cast.users or not g.is_tensor(source) or not g.is_tensor(cast):
        return None
    before, after = g.value(source), g.value(cast)
    if after.device.type != "cuda" or (before.dtype, after.dtype) not in CASTS or not _is_dense(before):
        return None
    if any(u is not cast and g.is_fusable(u) for u in g.consumers(_result(source))):  # a loop, with which Inductor may fuse the cast
        return None
    if source.op == "placeholder":
        mutated = any(map(g.is_mutating, source.users))
        return "inputs" if not mutated and all(_reads_tensor(u, cast) for u in g.consumers(cast)) else None
    return "results" if all(u.op == "output" for u in cast.users) and _leaves_tensor(g.through_views(source), after) else None


def _result(node: fx.Node) -> fx.Node:
    """What a node is a view of: of several results of an operator the one, which loops may read while the others are left."""
    while node.target in g.VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_dense(value: torch.Tensor) -> bool:
    sizes = (*value.shape, *value.stride())
    return all(isinstance(n, int) for n in sizes) and 0 not in value.shape and arguments.covers_memory(value)


def _reads_tensor(reader: fx.Node, cast: fx.Node) -> bool:
    """Whether a node reads a tensor as it lies, so that Inductor can't cast what it reads while it is read."""
    if reader.op == "output" or reader.target in _PRODUCTS or _is_ours(reader):
        return True
    if reader.target is not aten.convolution.default:
        return False
    args = g.arguments(reader)
    others = {g.through_views(args[name]) for name in ("input", "bias") if args[name] is not None}  # the bias is added by a loop
    return cast not in others and _is_orderless(g.value(args["weight"]))


def _leaves_tensor(owner: fx.Node, result: torch.Tensor) -> bool:
    """Whether a node leaves a tensor in memory, as it lies in the graph, with which Inductor can't fuse a cast."""
    if owner.target is aten.convolution_backward.default:
        return _is_orderless(result)
    return owner.target in _PRODUCTS or _is_ours(owner)


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "fusebackend"


def _is_orderless(weight: torch.Tensor) -> bool:
    """Whether a convolution's weight, or its bias, lies alike with its channels last: Inductor decides that later, and would copy."""
    return weight.dim() < 3 or weight.shape[1] == 1 or math.prod(weight.shape[2:]) == 1
