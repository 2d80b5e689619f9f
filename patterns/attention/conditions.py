"""Conditions that are known to hold everywhere: masks of models that hide nothing, computed from positions alone.

transformers gives an encoder without padding the mask ``arange(T)[:, None] >= 0``, in every batch, and fills the bias in by it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import is_view
from fusebackend.patterns.attention.numbers import uniform

aten, prims = torch.ops.aten, torch.ops.prims

_DEPTH = 12
_AND = frozenset({aten.bitwise_and.Tensor, aten.logical_and.default})
_COMPARISONS = {
    aten.ge.Scalar: lambda low, high, number: low >= number,
    aten.gt.Scalar: lambda low, high, number: low > number,
    aten.le.Scalar: lambda low, high, number: high <= number,
    aten.lt.Scalar: lambda low, high, number: high < number,
}
_SHIFTS = {aten.add.Tensor: operator.add, aten.sub.Tensor: operator.sub}


def holds_everywhere(condition: Any, depth: int = _DEPTH) -> bool:
    """Whether all elements of a boolean node are known to be true. Sizes may be symbolic."""
    if not g.is_tensor(condition) or depth == 0 or g.value(condition).dtype != torch.bool:
        return False
    if condition.target is aten.full.default:
        return condition.args[1] is True
    if is_view(condition):
        return holds_everywhere(condition.args[0], depth - 1)
    if condition.target in _AND:
        return all(holds_everywhere(a, depth - 1) for a in condition.args[:2])
    if condition.target in _COMPARISONS and isinstance(condition.args[1], (int, float)):
        low, high = _bounds(condition.args[0], depth - 1)
        return _COMPARISONS[condition.target](low, high, condition.args[1])
    return False


def _bounds(node: Any, depth: int) -> tuple[float, float]:
    """Between which numbers the elements of an integer node lie."""
    unknown = -math.inf, math.inf
    if not g.is_tensor(node) or depth == 0 or g.value(node).dtype != torch.int64:
        return unknown
    if node.target is prims.iota.default:
        start, step = node.kwargs["start"], node.kwargs["step"]
        count = node.args[0]
        if not isinstance(start, int) or not isinstance(step, int):
            return unknown
        last = start + step * max(count - 1, 0) if isinstance(count, int) else math.copysign(math.inf, step) if step else start
        return min(start, last), max(start, last)
    if is_view(node):
        return _bounds(node.args[0], depth - 1)
    if node.target in _SHIFTS and len(node.args) == 2 and not node.kwargs and uniform(node.args[1]) is not None:
        shift = _SHIFTS[node.target]
        low, high = _bounds(node.args[0], depth - 1)
        return shift(low, uniform(node.args[1])), shift(high, uniform(node.args[1]))
    return unknown


def chosen_everywhere(node: Any) -> fx.Node | None:
    """The operand that a ``where`` takes everywhere."""
    if not isinstance(node, fx.Node) or node.target is not aten.where.self or not holds_everywhere(node.args[0]):
        return None
    taken = node.args[1]
    return taken if isinstance(taken, fx.Node) and g.is_tensor(taken) and g.value(taken).dtype == g.value(node).dtype else None
