"""What a tensor is a multiple of: a base times a vector along each of some axes, as the terms of an interpolation's gradient are.

Linear interpolation gives ``g * h``, and what is left of g, ``g - g * h``; the same along the next axis, of both. Read from the graph,
these have the weights h and 1 - h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.emitted_sizes import merged
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten

#: How a vector of weights is computed: ``("vector", node)``, ``("product", a, b)``, ``("sum", factor of a, a, factor of b, b)``; or ones.
Weight = tuple
ONE: Weight = ()

_MAX_DEPTH = 16  # of what is read; a tensor behind so many operators is a base


@dataclasses.dataclass(frozen=True)
class Weighted:
    """``base`` times ``factor`` and a vector along each axis.

    Attributes:
        weights: for each axis.
        nodes: what is computed on the way from the base.
    """

    base: fx.Node
    weights: tuple[Weight, ...]
    factor: float = 1.0
    nodes: tuple[fx.Node, ...] = ()

    def scaled(self, factor: float, node: fx.Node) -> Weighted:
        return dataclasses.replace(self, factor=self.factor * factor, nodes=(*self.nodes, node))

    def unfactored(self) -> Weighted:
        """The same with the factor among the first axis' weights."""
        if self.factor == 1:
            return self
        return dataclasses.replace(self, weights=(("sum", self.factor, self.weights[0], 0.0, ONE), *self.weights[1:]), factor=1.0)


def axis_of(vector: torch.Tensor, sizes: Sequence[Any]) -> int | None:
    """Along which of the dims of ``sizes``, the last of which it broadcasts to, a tensor is a vector; None if it is none."""
    lead = len(sizes) - vector.dim()
    if lead < 0:
        return None
    shape = [1] * lead + list(vector.shape)
    along = [d for d, n in enumerate(shape) if not g.same_size(n, 1)]
    if len(along) == 1:
        return along[0] if g.same_size(shape[along[0]], sizes[along[0]]) else None
    ones = [d for d, n in enumerate(sizes) if g.same_size(n, 1)]
    return ones[0] if not along and len(ones) == 1 else None


def read_weighted(node: fx.Node, dim: int, axes: int, depth: int = 0) -> Weighted:
    """What ``node`` is a multiple of, by vectors along ``axes`` dims from ``dim`` on."""
    itself = Weighted(node, (ONE,) * axes)
    if depth == _MAX_DEPTH or node.kwargs or node.op != "call_function" or not g.is_tensor(node):
        return itself
    if node.target is aten.neg.default:
        return read_weighted(node.args[0], dim, axes, depth + 1).scaled(-1.0, node)  # type: ignore[arg-type]
    if node.target is aten.mul.Tensor:
        for x, y in (node.args, node.args[::-1]):
            axis = _axis_of_factor(y, node, dim, axes)
            if axis is not None and _is_alike(x, node):
                found = read_weighted(x, dim, axes, depth + 1)  # type: ignore[arg-type]
                before = found.weights[axis]
                after: Weight = ("vector", y) if before == ONE else ("product", before, ("vector", y))
                weights = (*found.weights[:axis], after, *found.weights[axis + 1 :])
                return dataclasses.replace(found, weights=weights, nodes=(*found.nodes, node))
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and of_two_alike(node):
        a, b = (read_weighted(x, dim, axes, depth + 1) for x in node.args)  # type: ignore[arg-type]
        return _joined(a, b.scaled(-1.0, node) if node.target is aten.sub.Tensor else b, node) or itself
    return itself


def _joined(a: Weighted, b: Weighted, node: fx.Node) -> Weighted | None:
    """Their sum, if they are multiples of one base that differ along one axis at most."""
    differ = [axis for axis, (m, n) in enumerate(zip(a.weights, b.weights)) if m != n]
    if a.base is not b.base or len(differ) > 1:
        return None
    axis = differ[0] if differ else 0
    total: Weight = ("sum", a.factor, a.weights[axis], b.factor, b.weights[axis])
    nodes = tuple(dict.fromkeys((*a.nodes, *b.nodes, node)))
    return Weighted(a.base, (*a.weights[:axis], total, *a.weights[axis + 1 :]), nodes=nodes)


def _axis_of_factor(factor: Any, product: fx.Node, dim: int, axes: int) -> int | None:
    if not g.is_tensor(factor) or g.value(factor).dtype != g.value(product).dtype:
        return None
    found = axis_of(g.value(factor), g.value(product).shape)
    return found - dim if found is not None and dim <= found < dim + axes else None


def of_two_alike(node: fx.Node) -> bool:
    """Whether a sum or a difference is of two tensors of its own shape and dtype, and of no multiple of the second."""
    return not node.kwargs and len(node.args) == 2 and all(_is_alike(operand, node) for operand in node.args)


def _is_alike(operand: Any, result: fx.Node) -> bool:
    """Whether an operand is neither broadcast nor converted."""
    if not g.is_tensor(operand):
        return False
    value, given = g.value(result), g.value(operand)
    return given.dtype == value.dtype and g.same_sizes(given.shape, value.shape)


def emit(emitter: Emitter, weight: Weight, ones: Callable[[], fx.Node], made: dict[Weight, fx.Node]) -> fx.Node:
    """The vector of a weight.

    Args:
        ones: makes a vector of ones.
        made: those that are there already.
    """
    if weight not in made:
        made[weight] = _emit(emitter, weight, ones, made)
    return made[weight]


def _emit(emitter: Emitter, weight: Weight, ones: Callable[[], fx.Node], made: dict[Weight, fx.Node]) -> fx.Node:
    if weight == ONE:
        return ones()
    kind, *of = weight
    if kind == "vector":
        return as_vector(emitter, of[0])
    if kind == "product":
        return emitter.call(aten.mul.Tensor, *(emit(emitter, each, ones, made) for each in of))
    parts = of[:2], of[2:]
    number = sum(factor for factor, each in parts if each == ONE)
    vectors = [(factor, emit(emitter, each, ones, made)) for factor, each in parts if each != ONE]
    if not vectors:
        return emitter.call(aten.mul.Tensor, emit(emitter, ONE, ones, made), number)
    total, *others = (v if factor == 1 else emitter.call(aten.mul.Tensor, v, factor) for factor, v in vectors)
    for other in (*others, *([number] if number else [])):
        total = emitter.call(aten.add.Tensor, total, other)
    return total


def as_vector(emitter: Emitter, node: fx.Node) -> fx.Node:
    """A tensor of one dim of more than one element, if any, as a vector."""
    dims = g.value(node).dim()
    return merged(emitter, node, [dims]) if dims else emitter.call(aten.reshape.default, node, [1])
