"""Sums over outer dims, read from the graph: which dims are summed, and in which order they lie in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.ops import DTYPES, merges
from fusebackend.rewriting.pattern import Reject

aten, prims = torch.ops.aten, torch.ops.prims

SUMS = (aten.sum.dim_IntList, aten.mean.dim)


@dataclasses.dataclass(frozen=True)
class Site:
    """A sum, or a mean, over dims outside of the innermost one.

    Attributes:
        node: it.
        source: what is summed, seen through casts that change no value.
        order: the dims of ``source`` in memory, outermost first; those that are summed are beside one another.
        begin, end: they are ``order[begin:end]``.
        keepdim: whether they stay, with size 1.
    """

    node: fx.Node
    source: fx.Node
    order: tuple[int, ...]
    begin: int
    end: int
    keepdim: bool

    @property
    def is_mean(self) -> bool:
        return self.node.target is aten.mean.dim

    @property
    def summed(self) -> tuple[int, ...]:
        return self.order[self.begin : self.end]


def read(node: fx.Node) -> Site | Reject | None:
    """The sum at ``node``, one of ``SUMS``; why no kernel covers it; or None if its innermost dim is summed, or no float."""
    call = g.arguments(node)
    x, out = call["self"], g.value(node)
    if not g.is_tensor(x) or not isinstance(out, torch.Tensor) or not g.value(x).is_floating_point():
        return None
    found = rows_of(node, g.value(x), call["dim"] or ())
    if not isinstance(found, tuple):
        return found
    reason = why_not_in(g.value(x).dtype, out.dtype)
    return Reject(reason, node) if reason else Site(node, before_casts(x), *found, bool(call["keepdim"]))


def rows_of(node: fx.Node, value: torch.Tensor, reduced: Sequence[int]) -> tuple[tuple[int, ...], int, int] | Reject | None:
    """How the dims of ``value`` lie in memory if ``reduced`` are those of a reduction over rows: all dims from the outermost to the
    innermost, and where those that are reduced begin and end in that order. Why they can't be seen so, or None if the innermost one is
    reduced, or none, or all."""
    dims = {d % value.dim() for d in reduced} if value.dim() else set()
    if not dims or len(dims) == value.dim():
        return None
    wide = [d for d in range(value.dim()) if not g.same_size(value.shape[d], 1)]
    memory = g.memory_order(value)
    if memory is None:
        return Reject("sizes are not known before run time (unbacked symbols)", node)
    memory = [d for d in memory if d in wide]
    if not memory or memory[-1] in dims or dims.isdisjoint(memory):
        return None
    order = _order(value.dim(), memory, dims)
    if isinstance(order, str):
        return Reject(order, node)
    begin = next(i for i, d in enumerate(order) if d in dims)
    end = begin + len(dims)
    reason = _why_not_one(value, order, begin, end)
    return Reject(reason, node) if reason else (tuple(order), begin, end)


def why_not_in(dtype: torch.dtype, out: torch.dtype) -> str | None:
    """Why numbers of ``dtype`` are not added in ``out``."""
    if out not in DTYPES or dtype not in DTYPES or out.itemsize < dtype.itemsize:
        return f"the sum of {dtype} in {out} is not supported"
    return f"the sum of {dtype} in {out} rounds before it adds" if dtype.itemsize == out.itemsize and dtype != out else None


def _order(rank: int, memory: Sequence[int], dims: set[int]) -> list[int] | str:
    """All dims in memory order, those of size 1 where they do no harm; or why the sum is not of this family."""
    kept = [d for d in range(rank) if d not in dims]
    wide_kept = [d for d in memory if d not in dims]
    if wide_kept != sorted(wide_kept):
        return "the dims that are kept lie in memory in another order than in the result"
    first, last = (next(i for i, d in order if d in dims) for order in (enumerate(memory), reversed(list(enumerate(memory)))))
    if any(d not in dims for d in memory[first : last + 1]):
        return "dims that are summed lie on both sides of dims that are kept"
    outer = memory[first - 1] if first else -1  # the last kept dim outside of the summed ones
    summed = [d for d in dims if d not in memory] + [d for d in memory if d in dims]
    return [*(d for d in kept if d <= outer), *summed, *(d for d in kept if d > outer)]


def _why_not_one(value: torch.Tensor, order: Sequence[int], begin: int, end: int) -> str | None:
    """Why the dims outside, those that are summed, or those inside can't be seen as one dim each, for all sizes."""
    sizes, strides = [value.shape[d] for d in order], [value.stride(d) for d in order]
    parts: list[tuple[Any, Any] | None] = [
        merges(sizes[a:b], strides[a:b], g.same_size) for a, b in ((0, begin), (begin, end), (end, len(order)))
    ]
    if None in parts:
        return "dims that are summed, or kept, can't be seen as one: there are gaps between them"
    inner = parts[2]
    if inner is not None and inner[1] is not None and not g.same_size(inner[1], 1):
        return "the innermost dim has gaps"
    return None


def lies_as(site: Site, value: torch.Tensor) -> bool:
    """Whether the kernels can read a tensor beside what ``site`` sums: it has its shape, and can be seen as rows of columns as well."""
    summed = g.value(site.source)
    same = g.same_sizes(value.shape, summed.shape)
    return same and g.hints(value.stride()) is not None and _why_not_one(value, site.order, site.begin, site.end) is None


def between(site: Site, sources: Collection[fx.Node]) -> set[fx.Node]:
    """A sum, and what is computed between ``sources`` and it: casts, and a product."""
    found, pending = set[fx.Node](), [site.node]
    while pending:
        node = pending.pop()
        found.add(node)
        pending += [n for n in node.all_input_nodes if n not in sources and n not in found]
    return found


def before_casts(x: fx.Node) -> fx.Node:
    """What a cast to a wider type reads: the sum is made in a wide type anyway."""
    while widens(x):
        x = x.args[0]  # type: ignore[assignment]
    return x


def widens(node: fx.Node) -> bool:
    """Whether a node is a cast that changes no value, and no order in memory."""
    if node.target is not prims.convert_element_type.default or not g.is_tensor(node.args[0]):
        return False
    value, wider = g.value(node.args[0]), g.value(node)  # type: ignore[arg-type]
    narrow = value.dtype in (torch.float16, torch.bfloat16) and wider.dtype in (torch.float32, torch.float64)
    if not (narrow or (value.dtype, wider.dtype) == (torch.float32, torch.float64)):
        return False
    return g.same_sizes(value.stride(), wider.stride())
