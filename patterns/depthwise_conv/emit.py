"""Builds the replacement of a site: the operator's call, and for a conv1d views that have one row."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.channel_epilogue import Epilogue
from fusebackend.patterns.depthwise_conv.ops import depthwise_conv, depthwise_conv_backward, is_channels_last
from fusebackend.patterns.depthwise_conv.sites import Backward, Convolution
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten


def emit_forward(e: Emitter, conv: Convolution, after: Epilogue) -> fx.Node:
    """The value of ``after.output``."""
    bias = g.arguments(conv.node)["bias"]
    x, weight = _image(e, conv.x), _image(e, conv.weight)
    order = _order(g.value(after.output), g.value(x))
    y = e.call(depthwise_conv, x, weight, bias, list(conv.stride), list(conv.padding), list(conv.dilation), order, *after.arguments)
    return e.call(aten.squeeze.dim, y, 2) if conv.is_1d else y


def emit_backward(e: Emitter, site: Backward) -> list[fx.Node]:
    """The values of the ``site.results`` that are not None."""
    conv = site.conv
    x, weight, grad = (_image(e, n) for n in (conv.x, conv.weight, site.grad))
    of_x, of_weight, _ = site.results
    order = None if of_x is None else _order(g.value(of_x), g.value(x))
    weight_order = of_weight is not None and not conv.is_1d and is_channels_last(g.value(of_weight))
    numbers = (list(conv.stride), list(conv.padding), list(conv.dilation))
    needed = [r is not None for r in site.results]
    gradients = e.call(depthwise_conv_backward, grad, x, weight, *numbers, order, weight_order, *needed)
    picked = []
    for i, result in enumerate(site.results):
        if result is not None:
            gradient = e.call(operator.getitem, gradients, i)
            picked.append(e.call(aten.squeeze.dim, gradient, 2) if conv.is_1d and i < 2 else gradient)
    return picked


def _image(e: Emitter, node: fx.Node) -> fx.Node:
    """``node`` with one row, if it has none."""
    return e.call(aten.unsqueeze.default, node, 2) if g.value(node).dim() == 3 else node


def _order(wanted: torch.Tensor, x: torch.Tensor) -> bool | None:
    """The memory order of a result that is to be as ``wanted``. None, for that of x, where this is the same: Inductor may choose another
    order for x after the graph was rewritten, and the result then has that."""
    image = wanted.unsqueeze(2) if wanted.dim() == 3 else wanted
    channels_last = is_channels_last(image)
    return None if channels_last == is_channels_last(x) else channels_last
