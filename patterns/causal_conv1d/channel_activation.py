"""Reads the activations that the operator applies, as ATen's decompositions write them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.activation import read_silu
from fusebackend.patterns.causal_conv1d.nodes import added_to, either_order, is_number, operands, unwidened

aten = torch.ops.aten
prims = torch.ops.prims

#: A name of ``channel_reference.ACTIVATIONS``, the node of its value, and all of its nodes.
Found = tuple[str, fx.Node, tuple[fx.Node, ...]]


def read_activation(pre: fx.Node) -> Found | None:
    """The activation of ``pre``, if one is computed: in fp32 for 16-bit types, and converted back."""
    silu = read_silu(pre)
    if silu is not None:
        return "silu", *silu
    for value in [pre, *(u for u in pre.users if unwidened(u) is pre and u is not pre)]:
        for read in (_read_clamp, _read_hardswish, _read_gelu, _read_gelu_tanh):
            found = read(value)
            if found is None:
                continue
            name, output, nodes = found
            if value is pre:
                return found
            last = g.only_user(output, prims.convert_element_type.default)
            if last is not None and last.args[1] == g.value(pre).dtype:
                return name, last, (value, *nodes, last)
    return None


def _read_clamp(value: fx.Node) -> Found | None:
    """ReLU or ReLU6."""
    found = _clamped(value)
    if found is None:
        return None
    high, nodes = found
    name = {math.inf: "relu", 6.0: "relu6"}.get(high)
    return None if name is None else (name, nodes[-1], nodes)


def _clamped(value: fx.Node) -> tuple[float, tuple[fx.Node, ...]] | None:
    """(high, nodes) if ``value`` is clamped from 0 to that, the last node being the result."""
    for user in value.users:
        if user.op != "call_function" or not user.args or user.args[0] is not value:
            continue
        if user.target is aten.relu.default:
            return math.inf, (user,)
        if user.target in (aten.clamp.default, aten.hardtanh.default):
            low, high = (*user.args[1:], None, None)[:2]
            if is_number(low, 0) and not user.kwargs and (high is None or isinstance(high, (int, float))):
                return math.inf if high is None else float(high), (user,)
        for first, second in ((aten.clamp_min.default, aten.clamp_max.default), (aten.clamp_max.default, aten.clamp_min.default)):
            if user.target is not first:
                continue
            other = g.only_user(user, second)
            bounds = {first: user.args[1], **({second: other.args[1]} if other is not None else {})}
            high = bounds.get(aten.clamp_max.default, math.inf)
            if is_number(bounds.get(aten.clamp_min.default), 0) and isinstance(high, (int, float)):
                return float(high), (user,) if other is None else (user, other)
    return None


def _read_hardswish(value: fx.Node) -> Found | None:
    """``value * clamp(value + 3, 0, 6) / 6``."""
    for sum_ in value.users:
        found = _clamped(sum_) if added_to(3, sum_) is value else None
        if found is None or found[0] != 6:
            continue
        clamped = found[1][-1]
        for product in clamped.users:
            if any(a is clamped and b is value for a, b in either_order(operands(product, aten.mul.Tensor))):
                last = next((u for u in product.users if _scaled(u, 1 / 6) is product), None)
                if last is not None:
                    return "hardswish", last, (sum_, *found[1], product, last)
            if _scaled(product, 1 / 6) is clamped:  # hardsigmoid
                for last in product.users:
                    if any(a is product and b is value for a, b in either_order(operands(last, aten.mul.Tensor))):
                        return "hardswish", last, (sum_, *found[1], product, last)
    return None


def _read_gelu(value: fx.Node) -> Found | None:
    """``value * 0.5 * (1 + erf(value * sqrt(1/2)))``."""
    for half, one_plus, last in _halves(value):
        erf = added_to(1, one_plus)
        if not _is_call(erf, aten.erf.default) or _scaled(erf.args[0], math.sqrt(0.5)) is not value:
            continue
        return "gelu", last, (half, erf.args[0], erf, one_plus, last)
    return None


def _read_gelu_tanh(value: fx.Node) -> Found | None:
    """``value * 0.5 * (1 + tanh(sqrt(2/pi) * (value + 0.044715 * value**3)))``."""
    for half, one_plus, last in _halves(value):
        tanh = added_to(1, one_plus)
        if not _is_call(tanh, aten.tanh.default):
            continue
        inner = _scaled(tanh.args[0], math.sqrt(2 / math.pi))
        for a, cubic in either_order(operands(inner, aten.add.Tensor)):
            cube = _scaled(cubic, 0.044715) if a is value else None
            nodes = None if cube is None else _cube(cube, value)
            if nodes is not None:
                return "gelu_tanh", last, (half, *nodes, cubic, inner, tanh.args[0], tanh, one_plus, last)
    return None


def _halves(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """(half, other, product): products of a half of ``value`` and another node."""
    for half in value.users:
        if _scaled(half, 0.5) is not value:
            continue
        for product in half.users:
            for a, other in either_order(operands(product, aten.mul.Tensor)):
                if a is half and isinstance(other, fx.Node):
                    yield half, other, product


def _cube(node: Any, value: fx.Node) -> tuple[fx.Node, ...] | None:
    """The nodes of ``value**3`` if ``node`` is it."""
    if _is_call(node, aten.pow.Tensor_Scalar) and node.args[0] is value and is_number(node.args[1], 3):
        return (node,)
    for square, other in either_order(operands(node, aten.mul.Tensor)):
        if other is value and operands(square, aten.mul.Tensor) == (value, value):
            return square, node
    return None


def _scaled(node: Any, factor: float) -> Any:
    """The other operand of ``node`` if that multiplies by ``factor``, or divides by its inverse."""
    for a, b in either_order(operands(node, aten.mul.Tensor)):
        if isinstance(b, float) and math.isclose(b, factor, rel_tol=1e-7):
            return a
    pair = operands(node, aten.div.Tensor)
    if pair is not None and isinstance(pair[1], (int, float)) and math.isclose(pair[1] * factor, 1, rel_tol=1e-7):
        return pair[0]
    return None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target
