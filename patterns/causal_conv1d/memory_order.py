"""Brings values into a memory order, or to the strides that the graph expects, by operators that Inductor fuses with their neighbours."""

from __future__ import annotations

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten


def is_btc(tensor: torch.Tensor) -> bool:
    """Whether a (batch, channels, time) tensor lies in memory as (batch, time, channels)."""
    strides, sizes = g.hints(tensor.stride()), g.hints(tensor.shape)
    return strides is not None and sizes is not None and strides[1] == 1 and sizes[1] > 1 and strides[2] != 1 and sizes[2] > 1


def transpose(e: Emitter, node: fx.Node) -> fx.Node:
    """(batch, channels, time) as (batch, time, channels), or the other way."""
    return e.call(aten.permute.default, node, [0, 2, 1])


def in_order(e: Emitter, node: fx.Node, btc: bool) -> fx.Node:
    """``node``, copied if it lies in the other memory order."""
    tensor = g.value(node)
    strides, sizes = g.hints(tensor.stride()), g.hints(tensor.shape)
    dim = 1 if btc else 2
    if strides is not None and (strides[dim] == 1 or (sizes is not None and sizes[dim] <= 1)):
        return node
    if not btc:
        return e.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return transpose(e, e.call(aten.clone.default, transpose(e, node), memory_format=torch.contiguous_format))


def restride(e: Emitter, node: fx.Node, like: fx.Node, transposed: bool = False) -> fx.Node:
    """``node`` with the strides of ``like``. ``transposed``: ``like`` is (batch, time, channels), and so is what is returned."""
    if transposed:
        return transpose(e, _restride(e, node, g.value(like).transpose(1, 2)))
    return _restride(e, node, g.value(like))


def _restride(e: Emitter, node: fx.Node, wanted: torch.Tensor) -> fx.Node:
    if g.difference(wanted, g.value(node)) is None:
        return node
    node = in_order(e, node, btc=is_btc(wanted))
    if g.difference(wanted, g.value(node)) is None:
        return node
    # A slice of longer rows: the rows are made as long again.
    pitch, length = wanted.stride(1), wanted.shape[2]
    if isinstance(pitch, int) and isinstance(length, int) and pitch > length and wanted.stride(2) == 1:
        longer = e.call(aten.constant_pad_nd.default, node, [0, pitch - length], 0.0)
        return e.call(aten.slice.Tensor, longer, 2, 0, length)
    return node
