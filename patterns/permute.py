"""permute -> contiguous: transposes that must be materialised, at the speed of a copy.

Why it pays: Inductor tiles such a copy well where all sizes are static and even. Under symbolic sizes it does not tile (1.5x
to 130x slower than a copy on an H200), nor where a dim is short or odd (up to 1.7x); a matmul library that is given operands
in an order that it does not take copies them by PyTorch's strided kernel (3x to 6x). The tile engine here (csrc/tile) takes
shapes at run time and moves whole cache lines both ways.

What is looked for is a copy into another memory order, whatever made it: attention heads, NCHW <-> NHWC, window partition,
channel shuffle, a reshape that copies, an operand of ``bmm`` or of a 1-D convolution that must be brought into order first.

    permute: f32[8, 256, 512] = aten.permute(x, [0, 2, 1])         permute = aten.permute(x, [0, 2, 1])
    clone:   f32[8, 256, 512] = aten.clone(permute)            ->  clone = fusebackend.permute_copy(permute, [0, 1, 2])
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import torch
from torch import fx

from fusebackend import graph as g
from fusebackend import native, ops
from fusebackend.bench import Case
from fusebackend.pattern import Emitter, Match, Pattern, Reject
from fusebackend.registry import register

aten = torch.ops.aten


def reference(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """What the kernels compute, in PyTorch.

    Args:
        x: a tensor of any dtype of 1 to 16 bytes and any strides.
        order: the result's dims from outermost to innermost in memory.

    Returns:
        The same bits, laid out as ``torch.empty_permuted(x.shape, order)``.
    """
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


def _fake(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


permute_copy = ops.define(
    "permute_copy(Tensor x, int[] order) -> Tensor",
    fake=_fake,
    setup_context=lambda ctx, inputs, output: None,
    backward=lambda ctx, grad: (grad, None),
)


@dataclasses.dataclass(frozen=True)
class Site:
    """A copy into another memory order.

    Attributes:
        source: what is copied.
        order: the copy's dims from outermost to innermost in memory.
        argument: the index of ``source`` among the anchor's arguments, if the anchor makes the copy for itself; None if it is the copy.
        fusable: whether Inductor writes the copy itself, so that a pointwise neighbour could join it.
    """

    source: fx.Node
    order: list[int]
    argument: int | None = None
    fusable: bool = True


class Permute(Pattern):
    """Matches ``aten.clone`` and ``aten.reshape`` that change the memory order, and operands that are copied for their consumer."""

    name = "permute"
    priority = -1  # what computes something goes first
    anchors = (aten.clone.default, aten.reshape.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)

    def match(self, node: fx.Node) -> Match | Reject | None:
        answers = [_judge(node, site) for site in _sites(node)]
        sites = [a for a in answers if isinstance(a, Site)]
        if not sites:
            return next((a for a in answers if a is not None), None)

        def emit(e: Emitter) -> fx.Node:
            copies = {s.argument: e.call(permute_copy, s.source, s.order) for s in sites}
            if None in copies:
                return copies[None]
            return e.call(node.target, *(copies.get(i, a) for i, a in enumerate(node.args)), **node.kwargs)

        return Match((node,), emit)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def transposed(x):
            return x.transpose(1, 2).contiguous()

        def shuffled(x):
            return x.view(x.shape[0], 4, -1, x.shape[2]).transpose(1, 2).reshape(x.shape)

        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
        x = torch.randn(5, 260, 259) * 50
        return [(f, (x.to(t),)) for f in (transposed, shuffled) for t in dtypes]


def _sites(node: fx.Node) -> list[Site]:
    """The copies that ``node`` is or makes, whether or not they change the order."""
    call = g.arguments(node)
    if node.target is aten.clone.default:
        return [Site(call["self"], _order_of(node, call["memory_format"]))] if g.is_tensor(call["self"]) else []
    if node.target is aten.reshape.default:
        return _copying_reshape(node, call["self"])
    if node.target is aten.convolution.default:
        return _convolved(node, call["input"])
    return [s for i, a in enumerate(node.args) if (s := _multiplied(a, i))]


def _order_of(node: fx.Node, memory_format: torch.memory_format | None) -> list[int]:
    out = g.value(node)
    if memory_format is torch.contiguous_format:
        return list(range(out.dim()))
    return g.memory_order(out) or []


def _copying_reshape(node: fx.Node, x: fx.Node) -> list[Site]:
    return []


def _multiplied(operand: object, index: int) -> Site | None:
    """cuBLAS wants one of a matrix's dims contiguous; PyTorch makes a contiguous copy of what is not."""
    if not g.is_tensor(operand) or g.value(operand).dim() != 3:
        return None
    strides = g.hints(g.value(operand).stride())
    if strides is None or 1 in strides[1:]:
        return None
    order = [0, *sorted((1, 2), key=lambda d: -strides[d])]
    return Site(operand, order, index, fusable=g.value(operand).device.type == "cpu")


def _convolved(node: fx.Node, x: fx.Node) -> list[Site]:
    """Inductor brings the input of a 1-D convolution into its output's order. (Those of others it may lay out anew.)"""
    if not g.is_tensor(x) or g.value(x).dim() != 3 or g.value(node).dim() != 3:
        return []
    return [Site(x, order, 0)] if (order := g.memory_order(g.value(node))) == [0, 1, 2] else []


def _judge(node: fx.Node, site: Site) -> Site | Reject | None:
    """The site if it is worth replacing, why not, or None if it is no permutation."""
    return site
