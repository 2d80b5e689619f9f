"""Reads dropout of the probabilities out of a graph: what they are multiplied by between the softmax and the product with the values.

The mask stays a node of the graph, so that its random numbers are those that they were. The operators take its bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import Dims, after, is_cast, is_view
from fusebackend.patterns.attention.numbers import scaling

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Dropout:
    """``scale * mask * probabilities``.

    Attributes:
        mask: a boolean node.
        dims: its dims.
        nodes: behind the probabilities, up to what is multiplied by the values.
        converted: those that compute numbers of the mask, by which the probabilities are multiplied.
    """

    mask: fx.Node
    dims: Dims
    scale: float
    nodes: tuple[fx.Node, ...]
    converted: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Masking:
    """``factor * mask``, by which a tensor is multiplied; ``nodes`` compute it of the mask."""

    mask: fx.Node
    factor: float
    nodes: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A node that is ``factor`` times the probabilities where ``mask`` is set, and 0 elsewhere.

    Attributes:
        source: of which it is computed.
        mask: None as long as nothing is dropped.
    """

    source: fx.Node
    factor: float = 1.0
    mask: fx.Node | None = None


def read_dropped(held: Sequence[fx.Node]) -> dict[fx.Node, Dropped]:
    """What is computed of the nodes ``held``, which hold the probabilities, by a mask and by numbers, through views and casts."""
    found: dict[fx.Node, Dropped] = {}
    order = list(held)
    for node in order:
        before = found.get(node, Dropped(node))
        for user in node.users:
            step = None if user in order else _step(user, node, before)
            if step is not None and len(found) < _MOST_STEPS:
                found[user] = step
                order.append(user)
    return found


def _step(user: fx.Node, node: fx.Node, before: Dropped) -> Dropped | None:
    if (is_view(user) or is_cast(user)) and user.args[0] is node:
        return Dropped(node, before.factor, before.mask)
    scaled = scaling(user)
    if scaled is not None and scaled[0] is node:
        return Dropped(node, before.factor * scaled[1], before.mask)
    masked = masking(user, node)
    if masked is None or before.mask is not None:
        return None
    return Dropped(node, before.factor * masked.factor, masked.mask)


def dims_of_dropped(held: Mapping[fx.Node, Dims], dropped: Mapping[fx.Node, Dropped]) -> dict[fx.Node, Dims]:
    """The dims of each node, where they are known."""
    found = dict(held)
    for node, step in dropped.items():
        dims = found.get(step.source)
        if dims is not None and (is_view(node) or is_cast(node)):
            dims = after(node, dims)
        if dims is not None:
            found[node] = dims
    return {node: dims for node, dims in found.items() if node in dropped}


def dropout_of(node: fx.Node, dropped: Mapping[fx.Node, Dropped], dims: Mapping[fx.Node, Dims]) -> Dropout | None:
    """The dropout whose result ``node`` holds; None if nothing is dropped."""
    last, nodes = dropped[node], list[fx.Node]()
    at = node
    while at in dropped:
        nodes.append(at)
        if dropped[at].mask is last.mask and dropped.get(dropped[at].source, Dropped(at)).mask is None:
            masked = at
        at = dropped[at].source
    if last.mask is None:
        return None
    how = masking(masked, dropped[masked].source)
    return Dropout(last.mask, dims[masked], last.factor, tuple(reversed(nodes)), how.nodes if how is not None else ())


def masking(user: fx.Node, node: fx.Node) -> Masking | None:
    """By what ``user`` multiplies ``node``, if that is a mask."""
    if user.target is aten.mul.Tensor and len(user.args) == 2 and not user.kwargs:
        for x, other in (user.args, reversed(user.args)):
            found = _mask_of(other)
            if x is node and other is not node and found is not None and _fits(user, node, found.mask):
                return found
    return None


def _mask_of(value: Any) -> Masking | None:
    """The mask of which ``value`` is a multiple."""
    factor, nodes = 1.0, list[fx.Node]()
    for _ in range(_MOST_STEPS):
        if not g.is_tensor(value):
            return None
        if g.value(value).dtype == torch.bool:
            return Masking(value, factor, tuple(nodes))
        nodes.append(value)
        scaled = scaling(value)
        if scaled is not None:
            value, factor = scaled[0], factor * scaled[1]
        elif value.target in (prims.convert_element_type.default, aten._to_copy.default) and g.value(value).dtype.is_floating_point:
            value = value.args[0]
        else:
            return None
    return None


def _fits(user: fx.Node, node: fx.Node, mask: fx.Node) -> bool:
    """Whether nothing is broadcast."""
    shapes = [g.value(n).shape for n in (user, node, mask)]
    return all(g.same_sizes(s, shapes[0]) for s in shapes)
