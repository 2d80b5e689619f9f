"""What the readers of this family ask about single nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g

prims = torch.ops.prims


def size_of(size: Any) -> Any:
    """A size, which may be a node's value."""
    return g.value(size) if isinstance(size, fx.Node) else size


def is_number(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def operands(node: Any, target: Any) -> tuple[Any, Any] | None:
    """Both operands of a binary pointwise call; None for another call, or one with an ``alpha``."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not target:
        return None
    if node.kwargs or len(node.args) != 2:
        return None
    return node.args[0], node.args[1]


def either_order(pair: tuple[Any, Any] | None) -> Iterator[tuple[Any, Any]]:
    if pair is not None:
        yield pair
        yield pair[1], pair[0]


def added_to(number: float, node: Any) -> Any:
    """The other operand of ``node`` if that adds ``number``."""
    return _beside(number, node, torch.ops.aten.add.Tensor)


def times(number: float, node: Any) -> Any:
    """The other operand of ``node`` if that multiplies by ``number``."""
    return _beside(number, node, torch.ops.aten.mul.Tensor)


def _beside(number: float, node: Any, target: Any) -> Any:
    return next((a for a, b in either_order(operands(node, target)) if is_number(b, number)), None)


def unconverted(node: fx.Node) -> fx.Node:
    """Sees through one conversion of the dtype."""
    return node.args[0] if node.target is prims.convert_element_type.default else node


def unwidened(node: Any) -> Any:
    """Sees through a conversion to fp32, which pointwise decompositions make of 16-bit types."""
    if isinstance(node, fx.Node) and node.target is prims.convert_element_type.default:
        return node.args[0] if node.args[1] == torch.float32 else node
    return node
