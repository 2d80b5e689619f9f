"""The copies into another memory order that a node of the graph is or makes."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import fx

from fusebackend import fx_utils as g

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Reordering:
    """The geometry of a copy, without dims of size 1.

    Attributes:
        sizes: of the source.
        strides: of the source, in elements.
        itemsize: bytes of an element.
        source_order: the source's dims from outermost to innermost in memory.
        result_order: the copy's.
        static: whether no size and no stride is symbolic.
    """

    sizes: list[int]
    strides: list[int]
    itemsize: int
    source_order: list[int]
    result_order: list[int]
    static: bool

    @classmethod
    def of(cls, source: torch.Tensor, order: list[int]) -> Reordering | None:
        """That of a copy of ``source`` whose dims lie in memory in ``order``; None if a size or stride has no hint."""
        sizes, strides, source_order = g.hints(source.shape), g.hints(source.stride()), g.memory_order(source)
        if sizes is None or strides is None or source_order is None:
            return None
        before, after = ([d for d in o if sizes[d] != 1] for o in (source_order, order))
        static = all(isinstance(n, int) for n in (*source.shape, *source.stride()))
        return cls(sizes, strides, source.itemsize, before, after, static)

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @functools.cached_property
    def result_run(self) -> int:
        """Elements along the copy's inner dims that are one dim in the source too."""
        return g.run_length(self.sizes, self.result_order, self.source_order)

    @functools.cached_property
    def source_run(self) -> int:
        """Elements along the source's inner dims that are one dim in the copy too."""
        return g.run_length(self.sizes, self.source_order, self.result_order)

    @property
    def keeps_innermost_dim(self) -> bool:
        return self.source_order[-1] == self.result_order[-1]

    @functools.cached_property
    def merged_dims(self) -> int:
        """How many dims are left once those that stay side by side are one."""
        following = dict(zip(self.source_order, self.source_order[1:]))
        return 1 + sum(following.get(dim) != then for dim, then in zip(self.result_order, self.result_order[1:]))


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
    strides = g.hints(g.value(operand).stride())
    if strides is None or 1 in strides[1:]:
        return None
    order = [0, *sorted((1, 2), key=lambda d: -strides[d])]
    return Copy(node, operand, order, index, by_inductor=g.value(operand).device.type == "cpu")


def _convolution_input(node: fx.Node, x: fx.Node) -> Copy | None:
    """Inductor brings the input of a 1-D convolution into its output's order. (The layouts of 2-D ones it may choose anew.)"""
    if g.value(x).dim() != 3 or g.memory_order(g.value(node)) != [0, 1, 2]:
        return None
    return Copy(node, x, [0, 1, 2], 0)
