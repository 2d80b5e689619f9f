"""What an index names, where a graph computes it of nothing but sizes: positions of tokens, clamped or in buckets, as attention with
relative positions has them, or those of windows that overlap.

Threads that add to the row that is named most wait for one another, and neighbours are added faster than what lies anywhere, so a scatter's
time depends on it. A backward graph gets the index as an input. So it is looked at in the joint graph, whose nodes' ``meta`` the
partitioner keeps. This is for estimates and timing alone: that an index is known makes no rewrite legal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.log import log

_NOTE = "fusebackend_known_index"
_MOST_NODES, _MOST_ELEMENTS = 64, 1 << 22
#: Parts of the names of operators that add rows by an index.
_SCATTERS = ("index_put", "scatter_add", "scatter_reduce", "index_add", "embedding_dense_backward")


@dataclasses.dataclass(frozen=True)
class _Earlier:
    """The result of an earlier step."""

    step: int


@dataclasses.dataclass(frozen=True)
class Known:
    """An index that is computed of sizes, at those with which it was traced.

    Attributes:
        largest_share: the part of its elements that name the row that is named most.
        digest: a hash of how it is computed.
    """

    largest_share: float
    digest: str
    _steps: Sequence[tuple[Any, Any, Any]]

    def compute(self) -> torch.Tensor:
        """The index, on the CPU."""
        return _computed(self._steps)


def note(graph: fx.Graph) -> None:
    """Notes of each index of a scatter what :func:`largest_share` tells in the graphs that this one is divided into."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and any(part in node.target._schema.name for part in _SCATTERS):
            for index in node.all_input_nodes:
                largest_share(index)


def largest_share(index: fx.Node) -> float | None:
    """The part of an index's elements that name the row that is named most; None where the index is no integer tensor, or not known before
    run time. Symbolic sizes count as they were traced."""
    owner = g.through_views(index)
    if not all(isinstance(v := g.value(n), torch.Tensor) and v.dtype in (torch.int64, torch.int32) for n in (index, owner)):
        return None
    sizes = [g.hint(g.value(n).numel()) for n in (index, owner)]
    if sizes[0] is None or sizes[1] is None or sizes[0] < sizes[1]:
        return None  # it is a part of what is known
    if _NOTE not in owner.meta:
        try:
            owner.meta[_NOTE] = _read(owner)
        except Exception as error:
            log.debug("the index %s is not known before run time: %s", owner, error)
            owner.meta[_NOTE] = None
    found = noted(owner)
    return None if found is None else found.largest_share


def noted(node: fx.Node) -> Known | None:
    """What is known of a node of which :func:`largest_share` was asked, here or in the graph before it was divided."""
    return node.meta.get(_NOTE)


def _read(node: fx.Node) -> Known | None:
    nodes = _computed_of_sizes(node)
    if nodes is None:
        return None
    step: dict[fx.Node, Any] = {n: _Earlier(i) for i, n in enumerate(nodes)}

    def argument(n: fx.Node) -> Any:
        return step[n] if n in step else g.hint(g.value(n))

    steps = []
    for each in nodes:
        args, kwargs = fx.node.map_arg((each.args, each.kwargs), argument)
        here = {"device": torch.device("cpu")} if "device" in kwargs else {}
        steps.append((each.target, args, {**kwargs, **here}))
    with _disable_current_modes():
        index = _computed(steps).flatten()
        if index.numel() == 0 or int(index.max() - index.min()) > _MOST_ELEMENTS:
            return None
        share = float((index - index.min()).bincount().max()) / index.numel()
    return Known(share, hashlib.sha256(repr(steps).encode()).hexdigest(), steps)


def _computed(steps: Sequence[tuple[Any, Any, Any]]) -> torch.Tensor:
    results: list[torch.Tensor] = []
    with _disable_current_modes(), torch.no_grad():
        for target, args, kwargs in steps:
            given = fx.node.map_aggregate((args, kwargs), lambda a: results[a.step] if isinstance(a, _Earlier) else a)
            results.append(target(*given[0], **given[1]))
    return results[-1]


def _computed_of_sizes(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute ``node``, in the order of the graph, if they read nothing but sizes, and are few and small."""
    found, pending = set[fx.Node](), [node]
    while pending:
        each = pending.pop()
        value = g.value(each)
        if each in found or (isinstance(value, (int, torch.SymInt)) and g.hint(value) is not None):
            continue
        if not g.may_be_called_early(each) or len(found) >= _MOST_NODES:
            return None
        sizes = g.hints(value.shape)
        if sizes is None or math.prod(sizes) > _MOST_ELEMENTS:
            return None
        found.add(each)
        pending += each.all_input_nodes
    return sorted(found)
