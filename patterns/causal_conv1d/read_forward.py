"""Reads a forward convolution out of a joint graph, with the slice, the constant and the epilogue that follow it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.channel_epilogue import Epilogue
from fusebackend.patterns.causal_conv1d.nodes import either_order, size_of
from fusebackend.patterns.causal_conv1d.read_convolution import Convolution, read_convolution
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Forward:
    """A convolution with what follows it.

    Attributes:
        conv: the convolution, as if nothing were sliced off its result.
        bias: its bias, or None.
        left, right: its padding when what is sliced off is left out.
        shift: the constant that is added to it.
        transposed: whether ``pre`` is (batch, time, channels), by a permutation before the slice.
        pre: the value before SiLU.
        nodes: all nodes from the convolution to ``output``.
        silu: whether SiLU alone is included, and ``output`` is its value.
        after: what else is included behind ``pre``, and makes ``output``.
    """

    conv: Convolution
    bias: fx.Node | None
    left: Any
    right: Any
    shift: float
    transposed: bool
    pre: fx.Node
    nodes: tuple[fx.Node, ...]
    output: fx.Node
    silu: bool = False
    after: Epilogue | None = None

    @property
    def anchor(self) -> fx.Node:
        return self.nodes[0]

    def with_silu(self, output: fx.Node, nodes: tuple[fx.Node, ...]) -> Forward:
        return dataclasses.replace(self, output=output, nodes=(*self.nodes, *nodes), silu=True)

    def with_epilogue(self, after: Epilogue) -> Forward:
        return dataclasses.replace(self, output=after.output, nodes=(*self.nodes, *after.nodes), after=after)

    @property
    def absorbs(self) -> bool:
        """Whether anything behind ``pre`` is included."""
        return self.output is not self.pre

    @property
    def activates(self) -> bool:
        """Whether that has an activation."""
        return self.silu or (self.after is not None and bool(self.after.activation))


def read_forward(node: fx.Node) -> Forward | Reject | None:
    """The convolution at ``node`` with the slice along time and the constant that follow it, without an epilogue."""
    conv = read_convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    left, right, shift, transposed, last, nodes = conv.left, conv.right, 0.0, False, node, [node]
    permute = g.only_user(node, aten.permute.default)
    permute = permute if permute is not None and list(permute.args[1]) == [0, 2, 1] else None
    cut = g.only_user(permute or node, aten.slice.Tensor)
    kept = None if cut is None else _padding_kept(cut, conv, time=1 if permute else 2)
    if kept is not None:
        (left, right), transposed, last = kept, permute is not None, cut
        nodes += [permute, cut] if permute else [cut]
    added = g.only_user(last, aten.add.Tensor)
    if added is not None and not added.kwargs:
        constant = next((b for a, b in either_order(added.args) if a is last and isinstance(b, (int, float))), None)
        if constant is not None and not isinstance(constant, bool) and math.isfinite(constant):
            shift, last = float(constant), added
            nodes.append(added)
    return Forward(conv, g.arguments(node)["bias"], left, right, shift, transposed, last, tuple(nodes), last)


def read_forward_of(pre: fx.Node) -> Forward | None:
    """The convolution whose value before SiLU is ``pre`` or a node shortly after it."""
    node = pre
    for _ in range(4):  # slice, permutation and constant lie between
        if node.target is aten.convolution.default:
            found = read_forward(node)
            return found if isinstance(found, Forward) else None
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return None


def is_causal(conv: Convolution, left: Any, right: Any) -> bool:
    """Whether the padding is taps - 1 zeros before and none after: the result is as long as x."""
    return g.same_size(size_of(left), conv.taps - 1) and g.same_size(right, 0)


def _padding_kept(cut: fx.Node, conv: Convolution, time: int) -> tuple[Any, Any] | None:
    """The padding (left, right) with which the convolution computes just what ``cut``, a slice along time, keeps; None if that is not
    known."""
    args = g.arguments(cut)
    start = args["start"] or 0
    if args["dim"] not in (time, time - 3) or args["step"] != 1 or not isinstance(start, int):
        return None
    length, whole = g.value(cut).shape[time], g.value(conv.x).shape[2]
    if isinstance(conv.left, fx.Node) or isinstance(conv.right, fx.Node):
        return None
    if start < 0:
        start = g.value(cut.args[0]).shape[time] + start
        if not isinstance(start, int) or start < 0:
            return None
    left = conv.left - start
    right = length - whole - left + conv.taps - 1  # since whole + left + right - taps + 1 = length
    if g.same_size(right, conv.right):
        right = conv.right
    if isinstance(right, torch.SymInt):
        right = next((r for r in (0, conv.right) if g.same_size(right, r)), None)
    return None if right is None else (left, right)
