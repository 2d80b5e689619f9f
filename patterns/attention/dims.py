"""What the dims of a tensor are made of, followed through views.

A graph splits, merges and permutes dims between the products and the softmax: ``(batch * heads, T, S)`` becomes
``(batch, windows, heads, T, S)``. Each dim is a tuple of axes, outermost first. A view that splits an axis splits it for all tensors, also
for those that were read before: compare leaves. A dim of size 1 has no axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g

aten, prims = torch.ops.aten, torch.ops.prims

Size = Any  # int or torch.SymInt


class Axis:
    """One axis of the attention: a batch dim, the queries, the keys, or what is summed by a product. Equal to itself alone."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Size):
        self.size = size
        self.parts: tuple[Axis, ...] = ()

    def leaves(self) -> tuple[Axis, ...]:
        """Itself, or what it was split into."""
        return leaves(self.parts) if self.parts else (self,)

    def __repr__(self) -> str:
        return f"<{self.size}>"


Dim = tuple[Axis, ...]
Dims = tuple[Dim, ...]


def leaves(axes: Iterable[Axis]) -> Dim:
    return tuple(leaf for axis in axes for leaf in axis.leaves())


def all_leaves(dims: Dims) -> Dim:
    return leaves(axis for dim in dims for axis in dim)


def fresh(shape: Sequence[Size]) -> Dims:
    """New axes, one a dim."""
    return tuple(() if g.same_size(size, 1) else (Axis(size),) for size in shape)


def product(sizes: Iterable[Size]) -> Size:
    return math.prod(sizes)


def regrouped(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """The dims of a tensor that is viewed in another shape; None where they do not line up."""
    rest, found, at = list(all_leaves(dims)), list[Dim](), 0
    while at < len(shape):
        if g.same_size(shape[at], 1):
            found.append(())
            at += 1
            continue
        step = _next_group(rest, shape[at:])
        if step is None and _divides(rest, shape[at]):
            inner = rest[0].size // shape[at]
            (first,), (second,) = _split(rest[0], [shape[at], inner])
            found.append((first,))
            rest[:1] = [second]
            at += 1
            continue
        if step is None:
            return None
        axes, sizes = step
        group, rest = rest[:axes], rest[axes:]
        wanted = shape[at : at + sizes]
        at += sizes
        if axes == 1:
            found += _split(group[0], wanted)
        elif sizes == 1:
            found.append(tuple(group))
        else:
            return None
    return tuple(found) if not rest else None


def _next_group(axes: Sequence[Axis], shape: Sequence[Size]) -> tuple[int, int] | None:
    """How many axes are as long together as how many sizes; one of the two numbers is 1."""
    if not axes:
        return None
    for count in range(1, len(axes) + 1):
        if g.same_size(product(a.size for a in axes[:count]), shape[0]):
            return count, 1
    for count in range(2, len(shape) + 1):
        if g.same_size(product(shape[:count]), axes[0].size):
            return 1, count
    return None


def _divides(axes: Sequence[Axis], size: Size) -> bool:
    return bool(axes) and isinstance(axes[0].size, int) and isinstance(size, int) and size > 1 and axes[0].size % size == 0


def _split(axis: Axis, sizes: Sequence[Size]) -> list[Dim]:
    if len(sizes) == 1:
        return [(axis,)]
    dims = fresh(sizes)
    parts = tuple(a for dim in dims for a in dim)
    if len(parts) > 1:
        axis.parts = parts
        return list(dims)
    return [(axis,) if dim else () for dim in dims]


def broadcast(dims: Dims, operand: fx.Node) -> Dims | None:
    """The dims of an operand that is broadcast to a tensor with ``dims``; None where it is not known along which."""
    shape = g.value(operand).shape
    if len(shape) > len(dims):
        return None
    found: list[Dim] = []
    for size, dim in zip(shape, dims[len(dims) - len(shape) :]):
        if g.same_size(size, 1):
            found.append(())
        elif g.same_size(size, product(a.size for a in leaves(dim))):
            found.append(dim)
        else:
            return None
    return tuple(found)


# ---- views ----

_COPIES = frozenset({aten.clone.default, aten.alias.default, aten.detach.default})
_CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})
#: A conversion to fewer bits than these is no rounding to leave out: whoever writes it means it.
_CAST_BETWEEN = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)


def _order(node: fx.Node) -> list[int] | None:
    """The permutation that ``node`` applies."""
    rank = g.value(node).dim()
    if node.target is aten.permute.default:
        return [d % rank for d in g.arguments(node)["dims"]]
    if node.target is aten.transpose.int or node.target is aten.t.default:
        order = list(range(rank))
        a, b = (0, rank - 1) if node.target is aten.t.default else (node.args[1] % rank, node.args[2] % rank)
        order[a], order[b] = order[b], order[a]
        return order
    return None


def is_cast(node: Any) -> bool:
    """A conversion between floating-point types."""
    if not isinstance(node, fx.Node) or node.target not in _CASTS or not g.is_tensor(node) or not g.is_tensor(node.args[0]):
        return False
    values = g.value(node), g.value(node.args[0])
    return all(v.dtype in _CAST_BETWEEN for v in values) and values[0].device == values[1].device


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each number of the type ``narrow`` is one of the type ``wide``."""
    return torch.promote_types(wide, narrow) == wide


def is_view(node: Any) -> bool:
    """Whether ``node`` holds the elements of its first argument, each once or repeated by an expansion, in another order."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not g.is_tensor(node):
        return False
    if node.target in _COPIES or node.target in _RESHAPES or node.target is aten.expand.default or _order(node) is not None:
        return True
    return node.target is aten.slice.Tensor and g.same_sizes(g.value(node).shape, g.value(node.args[0]).shape)


def is_expansion(node: fx.Node) -> bool:
    """Whether ``node`` repeats elements."""
    return node.target is aten.expand.default and not g.same_size(g.value(node).numel(), g.value(node.args[0]).numel())


def after(node: fx.Node, dims: Dims) -> Dims | None:
    """The dims of ``node``, a view, a cast, or an operation element by element, from those of its first argument."""
    order = _order(node)
    if order is not None:
        return tuple(dims[d] for d in order)
    if node.target in _RESHAPES:
        return regrouped(dims, g.value(node).shape)
    if node.target is aten.expand.default:
        return None if is_expansion(node) else regrouped(dims, g.value(node).shape)
    return dims


def before(node: fx.Node, dims: Dims) -> Dims | None:
    """The dims of the first argument of ``node``, a view, a cast, or an operation element by element, from those of ``node``."""
    order = _order(node)
    if order is not None:
        return tuple(dims[order.index(d)] for d in range(len(order)))
    shape = g.value(node.args[0]).shape
    if node.target in _RESHAPES:
        return regrouped(dims, shape)
    if node.target is aten.expand.default:
        kept = dims[len(dims) - len(shape) :]
        known = [g.same_size(s, 1) or g.same_size(s, product(a.size for a in leaves(d))) for s, d in zip(shape, kept)]
        return tuple(() if g.same_size(s, 1) else d for s, d in zip(shape, kept)) if all(known) else None
    return dims


def is_empty(shape: Sequence[Size]) -> bool:
    """Whether a size is, or may be, 0."""
    return not all(isinstance(s, int) and s > 0 or not isinstance(s, int) and statically_known_true(s > 0) for s in shape)
