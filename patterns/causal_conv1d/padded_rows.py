"""The real rows that a Fourier transform is of, without the zeros around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.nodes import is_number, size_of
from fusebackend.patterns.causal_conv1d.spectrum import Rows, Unreadable

aten = torch.ops.aten
prims = torch.ops.prims


def padded_rows(node: fx.Node, axis: int) -> Rows:
    """What ``node`` is without zeros around it."""
    offset = 0
    while True:
        inner = _unpadded(node, axis)
        if inner is None:
            return Rows(node, axis, offset)
        node, offset = inner[0], offset + inner[1]


def _unpadded(node: fx.Node, axis: int) -> tuple[fx.Node, int] | None:
    """(what is padded with zeros along ``axis`` alone, how many stand before it), if something is."""
    if node.op != "call_function":
        return None
    if node.target is aten.constant_pad_nd.default:
        args = g.arguments(node)
        pad = list(args["pad"])
        last = 2 * (g.value(node).dim() - 1 - axis)
        before, after = (pad[last], size_of(pad[last + 1])) if last < len(pad) else (0, 0)
        others = [p for i, p in enumerate(pad) if i not in (last, last + 1)]
        only_here = all(is_number(p, 0) for p in others) and args["value"] in (0, 0.0, None)
        if only_here and isinstance(before, int) and before >= 0 and statically_known_true(after >= 0):
            return args["self"], before
    if node.target is aten.slice_scatter.default:
        args = g.arguments(node)
        start = args["start"] or 0
        here = args["dim"] % g.value(node).dim() == axis and args["step"] == 1 and isinstance(start, int) and start >= 0
        if here and is_zeros(args["self"]):
            return args["src"], start
    return None


def real_rows(node: Any) -> fx.Node:
    """The real tensor that a complex one without imaginary part was made of.

    Raises:
        Unreadable: there is none.
    """
    if node.target is prims.convert_element_type.default and not g.value(node.args[0]).is_complex():
        return node.args[0]
    if node.target is aten.view_as_complex.default:
        pair = node.args[0]
        if pair.target is aten.select_scatter.default and is_zeros(pair.args[0]) and g.arguments(pair)["index"] == 0:
            if g.arguments(pair)["dim"] % g.value(pair).dim() == g.value(pair).dim() - 1:
                return g.arguments(pair)["src"]
    raise Unreadable("an FFT of complex rows", node)


def is_zeros(node: Any) -> bool:
    """Whether all elements are zero; seen through slices."""
    while isinstance(node, fx.Node) and node.target is aten.slice.Tensor:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is aten.full.default and is_number(node.args[1], 0)
