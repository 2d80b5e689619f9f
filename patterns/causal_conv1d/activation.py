"""Reads SiLU, and the gradient of it, as ATen's decompositions write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.nodes import added_to, either_order, is_number, operands, times, unconverted, unwidened

aten = torch.ops.aten
prims = torch.ops.prims


def read_silu(pre: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """(``silu(pre)``, all nodes of it), if that is computed: one operator, or ``pre / (1 + exp(-pre))``, in fp32 for 16-bit types."""
    for user in pre.users:
        if user.target is aten.silu.default:
            return user, (user,)
    for value in [pre, *(u for u in pre.users if unwidened(u) is pre and u is not pre)]:
        for division in value.users:
            pair = operands(division, aten.div.Tensor)
            if pair is None or pair[0] is not value or not isinstance(pair[1], fx.Node):
                continue
            exp = _read_one_plus_exp(pair[1], value)
            if exp is None:
                continue
            nodes = [*exp, pair[1], division]
            if value is pre:
                return division, tuple(nodes)
            last = g.only_user(division, prims.convert_element_type.default)
            if last is not None and last.args[1] == g.value(pre).dtype:
                return last, (value, *nodes, last)
    return None


def read_silu_gradient(grad: fx.Node) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """(dy, pre, nodes) if ``grad`` is ``dy * s * (1 + pre * (1 - s))`` with ``s = sigmoid(pre)``."""
    product = unconverted(grad)
    for first, second in either_order(operands(product, aten.mul.Tensor)):
        inner = added_to(1, second)
        for value, complement in either_order(operands(inner, aten.mul.Tensor)):
            difference = operands(complement, aten.sub.Tensor)
            if difference is None or not is_number(difference[0], 1):
                continue
            sigmoid = difference[1]
            of_sigmoid = _read_sigmoid(sigmoid, value)
            if of_sigmoid is None:
                continue
            for dy, s in either_order(operands(first, aten.mul.Tensor)):
                if s is not sigmoid or not isinstance(dy, fx.Node):
                    continue
                pre, plain_dy = unwidened(value), unwidened(dy)
                if g.value(plain_dy).dtype != g.value(grad).dtype or g.value(pre).dtype != g.value(grad).dtype:
                    continue
                nodes = {grad, product, first, second, inner, complement, *of_sigmoid, value, dy} - {pre, plain_dy}
                return plain_dy, pre, tuple(sorted(nodes))
    return None


def _read_sigmoid(node: Any, value: Any) -> tuple[fx.Node, ...] | None:
    """The nodes of ``sigmoid(value)`` if ``node`` is it: one operator, or ``1 / (1 + exp(-value))`` as in torch 2.11."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.sigmoid.default:
        return (node,) if node.args[0] is value else None
    scaled = times(1, node)
    inverse = node if scaled is None else scaled
    if not isinstance(inverse, fx.Node) or inverse.target is not aten.reciprocal.default:
        return None
    one_plus = inverse.args[0]
    exp = _read_one_plus_exp(one_plus, value)
    return None if exp is None else tuple({node, inverse, one_plus, *exp})


def _read_one_plus_exp(node: Any, value: Any) -> tuple[fx.Node, fx.Node] | None:
    """(neg, exp) if ``node`` is ``exp(-value) + 1``."""
    exp = added_to(1, node)
    if not isinstance(exp, fx.Node) or exp.target is not aten.exp.default:
        return None
    neg = exp.args[0]
    return (neg, exp) if neg.target is aten.neg.default and neg.args[0] is value else None
