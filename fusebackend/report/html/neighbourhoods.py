"""Selects the parts of a graph to draw: the neighbourhoods of rewritten nodes and of near misses.

Nobody can read a drawing of thousands of nodes. A neighbourhood holds a few marked sites that are close together and the
nodes around them, before and after rewriting. Neighbourhoods that look alike, such as a model's layers, are drawn once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from fusebackend.rewriting.outcome import GraphCode, GraphNode

#: A graph of at most this many nodes is drawn whole.
MAX_NODES_DRAWN_WHOLE = 32
#: Number of edges between a marked node and the farthest nodes that are drawn with it.
HOPS = 2
# Overlapping neighbourhoods are merged up to this many nodes; a larger drawing would be illegible.
_MAX_NODES_MERGED = 48
# A node with more neighbours than this (a shared mask, a size) connects everything with everything.
_MAX_NEIGHBOURS = 8


@dataclasses.dataclass(frozen=True)
class Mark:
    """The nodes of one graph that a row of the page's tables is about.

    Attributes:
        row: the row's identifier.
        kind: ``"sub"`` for a substitution, ``"miss"`` for a near miss.
        pattern: the pattern's name.
        label: what distinguishes marks whose nodes look alike, e.g. the reason of a near miss.
        before, after: the names of the marked nodes in the graph before and after rewriting.
    """

    row: str
    kind: str
    pattern: str
    label: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclasses.dataclass
class Neighbourhood:
    """One drawing: its marks, and the nodes to show before and after rewriting, in topological order.

    Attributes:
        alike: the marks of the other neighbourhoods that look the same.
        skipped: number of nodes between the previous neighbourhood and this one, in the graph before rewriting, that are not drawn.
    """

    marks: list[Mark]
    before: list[GraphNode]
    after: list[GraphNode]
    alike: list[list[Mark]] = dataclasses.field(default_factory=list)
    skipped: int = 0


class IndexedGraph:
    """The nodes of a graph by name, with the position and the users of each."""

    def __init__(self, nodes: Sequence[GraphNode]):
        self.nodes = {n.name: n for n in nodes}
        self.position = {n.name: i for i, n in enumerate(nodes)}
        self.users: dict[str, list[str]] = collections.defaultdict(list)
        for node in nodes:
            for name in node.inputs:
                self.users[name].append(node.name)

    def neighbours(self, name: str) -> list[str]:
        """The inputs and users of a node. Where there are too many, those closest to it in the graph's order."""
        inputs = [i for i in self.nodes[name].inputs if i in self.nodes]
        found = [*inputs, *self.users[name]]
        if len(found) > _MAX_NEIGHBOURS:
            found.sort(key=lambda n: abs(self.position[n] - self.position[name]))
        return found[:_MAX_NEIGHBOURS]

    def is_local(self, name: str) -> bool:
        """Whether a path through ``name`` means that its ends are close: inputs, outputs and nodes with many neighbours connect all."""
        node = self.nodes[name]
        return node.target not in ("placeholder", "get_attr", "output") and len(node.inputs) + len(self.users[name]) <= _MAX_NEIGHBOURS

    def within_hops(self, names: Iterable[str]) -> set[str]:
        """The nodes at most :data:`HOPS` edges away from ``names``."""
        reached = {n for n in names if n in self.nodes}
        frontier = set(reached)
        for hop in range(HOPS):
            frontier = {n for f in frontier if hop == 0 or self.is_local(f) for n in self.neighbours(f)} - reached
            reached |= frontier
        return reached

    def in_order(self, names: Iterable[str]) -> list[GraphNode]:
        return [self.nodes[n] for n in sorted(names, key=self.position.__getitem__)]


def neighbourhoods(graph: GraphCode, marks: Sequence[Mark], limit: int = 40) -> tuple[list[Neighbourhood], int]:
    """Divides the marked parts of a graph into neighbourhoods, in topological order.

    Args:
        graph: the graph, with its nodes.
        marks: what the page says about the graph.
        limit: the largest number of neighbourhoods to return.

    Returns:
        The neighbourhoods, and the number of marks that are in none of them because of ``limit``.
    """
    before, after = IndexedGraph(graph.nodes_before), IndexedGraph(graph.nodes_after)
    marks = [m for m in marks if any(n in before.nodes for n in m.before) or any(n in after.nodes for n in m.after)]
    if not marks:
        return [], 0
    if len(graph.nodes_before) <= MAX_NODES_DRAWN_WHOLE:
        return [Neighbourhood(list(marks), list(graph.nodes_before), list(graph.nodes_after))], 0

    by_appearance: dict[tuple, Neighbourhood] = {}
    left_out = 0
    for group, names_before, names_after in _merged(marks, before, after):
        found = Neighbourhood(group, before.in_order(names_before), after.in_order(names_after))
        appearance = _appearance(found)
        if appearance in by_appearance:
            by_appearance[appearance].alike.append(group)
        elif len(by_appearance) < limit:
            by_appearance[appearance] = found
        else:
            left_out += len(group)
    drawn = list(by_appearance.values())
    _count_skipped(drawn, before)
    return drawn, left_out


def _merged(marks: Sequence[Mark], before: IndexedGraph, after: IndexedGraph) -> list[tuple[list[Mark], set[str], set[str]]]:
    """Groups of marks whose surroundings overlap, each with the names of its nodes before and after rewriting."""
    groups: list[tuple[list[Mark], set[str], set[str]]] = []
    for mark in sorted(marks, key=lambda m: _first_position([m], before)):
        old = before.within_hops(mark.before)
        # The unchanged nodes around the old ones are shown on both sides, so that a reader can relate the two drawings.
        new = after.within_hops(mark.after) | {n for n in old if n in after.nodes}
        if groups:
            last, last_old, last_new = groups[-1]
            overlap = any(before.is_local(n) for n in old & last_old)
            if overlap and len(old | last_old) <= _MAX_NODES_MERGED:
                groups[-1] = ([*last, mark], last_old | old, last_new | new)
                continue
        groups.append(([mark], old, new))
    return groups


def _first_position(marks: Iterable[Mark], graph: IndexedGraph) -> int:
    return min((graph.position[n] for m in marks for n in m.before if n in graph.position), default=0)


def _appearance(neighbourhood: Neighbourhood) -> tuple:
    """Equal for neighbourhoods whose drawings differ in the nodes' names only."""

    def side(nodes: list[GraphNode], which: str) -> tuple:
        index = {n.name: i for i, n in enumerate(nodes)}
        marked = {n: (m.kind, m.pattern, m.label) for m in neighbourhood.marks for n in getattr(m, which)}
        return tuple((n.target, n.spec, marked.get(n.name), tuple(index.get(i, -1) for i in n.inputs)) for n in nodes)

    return side(neighbourhood.before, "before"), side(neighbourhood.after, "after")


def _count_skipped(drawn: list[Neighbourhood], before: IndexedGraph) -> None:
    shown = {n.name for d in drawn for n in d.before}
    starts = [_first_position(d.marks, before) for d in drawn]
    hidden = [i for n, i in before.position.items() if n not in shown]
    for neighbourhood, low, high in zip(drawn, [-1, *starts], starts):
        neighbourhood.skipped = sum(low < i < high for i in hidden)
