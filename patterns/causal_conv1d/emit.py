"""Builds the replacement of a site: the operator's call, with the conversions and copies that it needs."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.memory_order import in_order, restride, transpose
from fusebackend.patterns.causal_conv1d.ops import causal_conv1d, causal_conv1d_backward
from fusebackend.patterns.causal_conv1d.orders import backward_orders, forward_orders
from fusebackend.patterns.causal_conv1d.read_backward import Backward
from fusebackend.patterns.causal_conv1d.read_forward import Forward
from fusebackend.rewriting.pattern import Emitter

prims = torch.ops.prims


def emit_forward(e: Emitter, site: Forward) -> fx.Node:
    """The value of ``site.output``."""
    orders = forward_orders(site)
    x = _operand(e, _converted(e, site.conv.x, site.conv.dtype), orders.operands)
    absorbed = site.after.arguments if site.after is not None else ()
    y = e.call(causal_conv1d, x, site.conv.weight, site.bias, site.left, site.right, site.shift, site.silu, orders.result, *absorbed)
    return restride(e, y, site.output, site.transposed)


def emit_backward(e: Emitter, site: Backward) -> list[fx.Node]:
    """The values of the ``site.results`` that are not None."""
    orders = backward_orders(site)
    x = _operand(e, _converted(e, site.conv.x, site.conv.dtype), orders.operands)
    grad = _operand(e, transpose(e, site.grad) if site.transposed else site.grad, orders.operands)
    needed = [r is not None for r in site.results]
    gradients = e.call(
        causal_conv1d_backward, grad, x, site.conv.weight, site.bias, site.left, site.shift, site.silu, orders.result, *needed
    )
    picked = []
    for i, result in enumerate(site.results):
        if result is not None:
            gradient = _converted(e, e.call(operator.getitem, gradients, i), g.value(result).dtype)
            picked.append(restride(e, gradient, result))
    return picked


def _converted(e: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if g.value(node).dtype == dtype else e.call(prims.convert_element_type.default, node, dtype)


def _operand(e: Emitter, node: fx.Node, btc: bool | None) -> fx.Node:
    return node if btc is None else in_order(e, node, btc)
