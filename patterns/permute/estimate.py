"""What a copy makes a device do: in the kernel, and in Inductor's or PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.permute.sites import Copy
from fusebackend.patterns.permute.tile_work import tile_work
from fusebackend.rewriting.pattern import Generated, Match, Work, Workload
from fusebackend.rewriting.reordering import copy_geometry
from fusebackend.rewriting.workload import stream

aten = torch.ops.aten

#: Whose models tell of the loops that Inductor generates to read across memory order: other families' tell less of them.
ACROSS_MEMORY = "permute"


def workload(copies: Sequence[Copy], match: Match | None = None) -> Workload:
    """That of a node for which ``copies`` are made by ``permute_copy``."""
    ours, inductor, neighbours = [], [], []
    for copy in copies:
        ours.append(_ours(copy))
        inductor.append(_inductor(copy))
        if copy.by_inductor:
            neighbours += _fused_neighbours(copy)
    ours += [stream(node) for node in neighbours]
    return Workload(tuple(ours), tuple(inductor), neighbours[0] if neighbours else None, match)


def _fused_neighbours(copy: Copy) -> list[fx.Node]:
    if copy.argument is None:
        return g.fused_neighbours(copy.node)
    producer = g.through_views(copy.source)
    return [producer] if g.is_fusable(producer) else []


def _ours(copy: Copy) -> Work:
    if copy.device.type == "cpu":
        return Work("permute cpu", *copy_geometry(copy.reordering))
    return tile_work("permute", g.value(copy.source), copy.order, g.value(copy.source))


def _inductor(copy: Copy) -> Work | Generated:
    if copy.device.type == "cpu":
        return Work("copy cpu" if copy.by_inductor else "strided copy cpu", *copy_geometry(copy.reordering))
    if not copy.by_inductor:
        return Work("strided copy", *copy_geometry(copy.reordering))
    return Generated((copy.node if copy.argument is None else _as_clone(copy.source),), family=ACROSS_MEMORY)


def _as_clone(source: fx.Node) -> fx.Node:
    """A node, in a graph of its own, that is the copy which Inductor makes of a convolution's input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = g.value(source)
    clone = graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    with g.value(source).fake_mode:
        clone.meta["val"] = aten.clone.default(g.value(source), memory_format=torch.contiguous_format)
    graph.output((clone,))
    return clone
