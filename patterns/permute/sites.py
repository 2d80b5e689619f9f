"""The copies into another memory order that a node of the graph is or makes."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.reordering import Reordering

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy, which may change the memory order or not.

    Attributes:
        node: the node that is the copy, or that makes it for itself.
        source: what is copied.
        order: the copy's dims from outermost to innermost in memory.
        argument: the index of ``source`` among the node's arguments, if the node makes the copy for itself; None if it is the copy.
        by_inductor: whether Inductor generates the copy, so that it could be fused with a neighbour; else the library that ``node`` calls
            copies by PyTorch's strided kernel.
    """

    node: fx.Node
    source: fx.Node
    order: list[int]
    argument: int | None = None
    by_inductor: bool = True

    @functools.cached_property
    def reordering(self) -> Reordering | None:
        """None if a size is not known before run time."""
        return Reordering.of(g.value(self.source), self.order)

    @property
    def device(self) -> torch.device:
        return g.value(self.source).device


def copies(node: fx.Node) -> list[Copy]:
    """The copies that ``node``, an anchor of the pattern, is or makes."""
    call = g.arguments(node)
    if node.target is aten.clone.default:
        found = [_clone(node, call["self"], call["memory_format"])]
    elif node.target is aten.convolution.default:
        found = [_convolution_input(node, call["input"])]
    else:
        found = [_matmul_operand(node, operand, i) for i, operand in enumerate(node.args)]
    return [copy for copy in found if copy is not None]


def _clone(node: fx.Node, x: fx.Node, memory_format: torch.memory_format | None) -> Copy | None:
    order = list(range(g.value(node).dim())) if memory_format is torch.contiguous_format else g.memory_order(g.value(node))
    return None if order is None else Copy(node, x, order)


def _matmul_operand(node: fx.Node, operand: object, index: int) -> Copy | None:
    """cuBLAS needs a matrix to be contiguous along one dim; of others, PyTorch's strided kernel makes a copy, on the CPU Inductor."""
    if not g.is_tensor(operand) or g.value(operand).dim() != 3:
        return None
    dtype = g.value(operand).dtype
    if dtype.is_floating_point and dtype.itemsize == 1:  # the library's kernel for such matrices has no float8, the strided one has
        return None
    strides = g.hints(g.value(operand).stride())
    if strides is None or 1 in strides[1:]:
        return None
    order = [0, *sorted((1, 2), key=lambda d: -strides[d])]
    return Copy(node, operand, order, index, by_inductor=g.value(operand).device.type == "cpu")


def _convolution_input(node: fx.Node, x: fx.Node) -> Copy | None:
    """Inductor brings the input of a 1-D convolution into its output's order. (The layouts of 2-D ones it may choose anew.)"""
    if g.value(x).dim() != 3 or g.memory_order(g.value(node)) != [0, 1, 2]:
        return None
    if any(isinstance(size, torch.SymInt) and g.hint(size) == 0 for size in g.value(x).shape):
        return None  # the fake of a convolution divides by the hints
    return Copy(node, x, [0, 1, 2], 0)
