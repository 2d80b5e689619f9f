"""Sums along rows by an index, read from the graph: ``scatter_add`` along the last dim."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import arguments
from fusebackend.patterns.row_scatter.ops import DTYPES, INDEX_DTYPES, limits
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

SUMS = (aten.scatter_add.default, aten.scatter_reduce.two)


@dataclasses.dataclass(frozen=True)
class Site:
    """``output = self; output[r][index[r][k]] += source[r][k]`` for the rows ``r`` of the last dim.

    Attributes:
        node: the sum.
        self: what is added to.
        index: of the source's sizes, or 1 where it repeats.
        source: what is added.
    """

    node: fx.Node
    self: fx.Node
    index: fx.Node
    source: fx.Node

    @property
    def onto_zeros(self) -> bool:
        return self.self.target is aten.full.default and self.self.args[1] == 0

    @property
    def bins(self) -> Any:
        """Elements of a row of the result: an int or a SymInt."""
        return g.value(self.node).shape[-1]

    def index_strides(self) -> tuple[Any, ...]:
        """Those of the index, 0 along dims in which it repeats."""
        index = g.value(self.index)
        return tuple(0 if g.same_size(n, 1) else s for n, s in zip(index.shape, index.stride()))


def read(node: fx.Node) -> Site | Reject | None:
    """The sum at ``node``, one of ``SUMS``; why no kernel covers it; None if it is another reduction, or one number names a whole row."""
    call = g.arguments(node)
    if node.target is aten.scatter_reduce.two and (call["reduce"] != "sum" or not call["include_self"]):
        return None
    out, index, source = (g.value(n) for n in (node, call["index"], call["src"]))
    rank = out.dim()
    if rank == 0 or index.dim() != rank or source.dim() != rank:  # scalars count as vectors of one
        return None
    dim = call["dim"] % rank
    inner = _before_expand(call["index"])
    if all(g.same_size(n, 1) for d, n in enumerate(g.value(inner).shape) if d != dim):
        return None  # the family index_add's
    if dim != rank - 1:
        return Reject("the indexed dim is not the last one", node)
    if not all(map(g.same_size, index.shape, source.shape)):
        return Reject("the index does not cover all of the source", node)
    if not all(map(g.same_size, source.shape[:-1], out.shape[:-1])):
        return Reject("the index does not cover all rows", node)
    if out.dtype not in DTYPES:
        return Reject(f"dtype {str(out.dtype).removeprefix('torch.')} is not supported", node)
    if index.dtype not in INDEX_DTYPES:
        return Reject(f"the index is {str(index.dtype).removeprefix('torch.')}; int32 and int64 are accepted", node)
    reason = _why_too_large(rank, out.shape[-1], source.shape[-1])
    if reason:
        return Reject(reason, node)
    if not arguments.is_contiguous(out):
        return Reject("the result is not contiguous", node)
    if {out.device} != {source.device, index.device}:
        return Reject("the tensors are on several devices", node)
    site = Site(node, call["self"], inner, call["src"])
    if not site.onto_zeros and not arguments.is_contiguous(g.value(site.self)):
        return Reject("what is added to is not contiguous", site.self)
    return site


def _why_too_large(rank: int, bins: Any, sources: Any) -> str | None:
    most_dims, most_row = limits()
    if rank > most_dims:
        return f"{rank} dimensions; up to {most_dims} are accepted"
    for size in (bins, sources):
        hint = g.hint(size)
        if hint is None:
            return "rows whose length is not known before run time (unbacked symbols)"
        if hint > most_row:
            return f"rows of {hint} elements; up to {most_row} are accepted"
    return None


def _before_expand(index: fx.Node) -> fx.Node:
    """The index with sizes of 1 where it repeats, if it is written so."""
    inner = index.args[0] if index.target is aten.expand.default else None
    return inner if isinstance(inner, fx.Node) and g.value(inner).dim() == g.value(index).dim() else index
