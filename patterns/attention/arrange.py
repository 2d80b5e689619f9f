"""Brings tensors from one arrangement of axes into another, by views where memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import Axis, Dims, Size, leaves, product
from fusebackend.rewriting.pattern import Emitter, Refusal

aten, prims = torch.ops.aten, torch.ops.prims

#: (operator, arguments behind the tensor): sizes in them may be symbolic.
Step = tuple[Callable, tuple]


def steps(value: torch.Tensor, dims: Dims, wanted: Sequence[Sequence[Axis]], *, repeat: bool) -> list[Step]:
    """How a tensor with ``dims`` becomes one with the dims ``wanted``.

    Args:
        repeat: whether an axis that the tensor lacks is expanded. A wanted dim of which it has an axis always is whole.
    """
    made: list[Step] = []

    def do(target: Callable, *arguments: Any) -> None:
        nonlocal value
        with value.fake_mode:  # type: ignore[attr-defined]
            value = target(value, *arguments)
        made.append((target, arguments))

    held = [leaf for dim in dims for leaf in leaves(dim)]
    if any(len(leaves(dim)) != 1 for dim in dims):
        do(aten.view.default, [axis.size for axis in held])
    order = [axis for dim in wanted for axis in leaves(dim) if axis in held]
    if order != held:
        do(aten.permute.default, [held.index(axis) for axis in order])
    whole: list[Axis] = []
    sizes: list[Size] = []
    for dim in wanted:
        axes = leaves(dim)
        present = repeat or any(axis in order for axis in axes)
        whole += axes if present else ()
        sizes.append(product(axis.size for axis in axes) if present else 1)
    if whole != order:
        for at, axis in enumerate(whole):
            if axis not in order:
                do(aten.unsqueeze.default, at)
        do(aten.expand.default, [axis.size for axis in whole])
    if len(whole) != len(sizes) or not all(map(g.same_size, value.shape, sizes)):
        if not _merges(value, wanted, whole):
            do(_contiguous)
        do(aten.view.default, sizes)
    return made


def _merges(value: torch.Tensor, wanted: Sequence[Sequence[Axis]], whole: list[Axis]) -> bool:
    """Whether axes that become one dim lie in memory as one."""
    strides = value.stride()
    for dim in wanted:
        at = [whole.index(axis) for axis in leaves(dim) if axis in whole]
        if not all(g.same_size(strides[a], strides[b] * value.shape[b]) for a, b in zip(at, at[1:])):
            return False
    return True


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return aten.clone.default(x, memory_format=torch.contiguous_format)


def copies(made: Sequence[Step]) -> bool:
    """Whether one of the steps is a copy."""
    return any(target is _contiguous for target, _ in made)


def apply(value: torch.Tensor, made: Sequence[Step]) -> torch.Tensor:
    """The fake value that the steps make of ``value``."""
    with value.fake_mode:  # type: ignore[attr-defined]
        for target, arguments in made:
            value = target(value, *arguments)
    return value


def arrange(e: Emitter, node: fx.Node, dims: Dims, wanted: Sequence[Sequence[Axis]], *, repeat: bool) -> fx.Node:
    """``node``, which has ``dims``, with the dims ``wanted``."""
    for target, arguments in steps(g.value(node), dims, wanted, repeat=repeat):
        if target is _contiguous:
            node = contiguous(e, node)
        else:
            node = e.call(target, node, *(_in_graph(node.graph, a) for a in arguments))
    return node


def contiguous(e: Emitter, node: fx.Node) -> fx.Node:
    return e.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def has_rows(value: torch.Tensor) -> bool:
    """Whether elements along the last dim lie side by side. Kernels copy what has none, where Inductor writes a copy as it computes it."""
    return g.same_size(value.shape[-1], 1) or g.same_size(value.stride(-1), 1)


def by_tokens(e: Emitter, node: fx.Node) -> fx.Node:
    """(..., heads, tokens, elements) as (..., tokens, heads, elements), and back."""
    rank = g.value(node).dim()
    return e.call(aten.permute.default, node, [*range(rank - 3), rank - 2, rank - 3, rank - 1])


def in_rows(e: Emitter, node: fx.Node) -> fx.Node:
    """The tokens (..., heads, tokens, elements) as kernels read them. In a copy the heads of a token follow one another."""
    return node if has_rows(g.value(node)) else by_tokens(e, contiguous(e, by_tokens(e, node)))


def _in_graph(graph: fx.Graph, argument: Any) -> Any:
    """``argument`` with the nodes of the graph that hold its symbolic sizes."""
    if isinstance(argument, (list, tuple)):
        return [_in_graph(graph, a) for a in argument]
    return argument if isinstance(argument, int) else size_node(graph, argument)


def size_node(graph: fx.Graph, size: torch.SymInt) -> fx.Node:
    """A node of the graph that holds this size.

    Raises:
        Refusal: there is none.
    """
    for node in graph.nodes:
        held = g.value(node)
        if isinstance(held, torch.SymInt) and g.same_size(held, size):
            return node
    raise Refusal(f"no node of the graph holds the size {size}")


def converted(e: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if g.value(node).dtype == dtype else e.call(prims.convert_element_type.default, node, dtype)


def in_place_of(e: Emitter, wanted: torch.Tensor, node: fx.Node) -> fx.Node:
    """``node`` in the memory order of ``wanted``, which has its shape."""
    if g.difference(wanted, g.value(node)) is None:
        return node
    order = g.memory_order(wanted) or list(range(wanted.dim()))
    if order == sorted(order):
        return contiguous(e, node)
    node = contiguous(e, e.call(aten.permute.default, node, order))
    return e.call(aten.permute.default, node, [order.index(d) for d in range(len(order))])
