"""Which parts of a graph are drawn: the neighbourhoods of what was rewritten and of what nearly was.

A graph of thousands of nodes shown whole tells nobody anything. A scene is a few of its marked places that stand close
together, with the nodes around them, before and after; scenes that look alike (the layers of a model) are drawn once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from fusebackend.rewriting.outcome import GraphCode, GraphNode

#: A graph up to this many nodes is drawn whole.
WHOLE = 32
#: How far from a marked node the drawing goes.
HOPS = 2
# Nobody reads a scene beyond this; marks that stand closer than that are parted, and their scenes overlap.
_LARGEST = 48
# Through a node with more neighbours than this (a shared mask, a size) everything is near to everything.
_HUB = 8


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in a graph that a row of the page is about.

    Attributes:
        row: the row's identifier.
        kind: ``"sub"``, a substitution, or ``"miss"``, a near miss.
        pattern: the pattern's name.
        label: what tells marks apart that look alike in the graph, e.g. the reason of a near miss.
        before, after: the names of the marked nodes.
    """

    row: str
    kind: str
    pattern: str
    label: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclasses.dataclass
class Scene:
    """One drawing: the nodes to show on either side, in topological order, and the marks among them.

    Attributes:
        alike: the marks of the scenes that would look the same.
        elided: how many nodes of the graph before rewriting, since the last scene, are drawn nowhere.
    """

    marks: list[Mark]
    before: list[GraphNode]
    after: list[GraphNode]
    alike: list[list[Mark]] = dataclasses.field(default_factory=list)
    elided: int = 0


class Side:
    """A graph's nodes by name, with their users and positions."""

    def __init__(self, nodes: Sequence[GraphNode]):
        self.nodes = {n.name: n for n in nodes}
        self.position = {n.name: i for i, n in enumerate(nodes)}
        self.users: dict[str, list[str]] = collections.defaultdict(list)
        for node in nodes:
            for name in node.inputs:
                self.users[name].append(node.name)

    def near(self, name: str) -> list[str]:
        """Inputs and users; of a hub the nearest in the graph's order."""
        inputs = [i for i in self.nodes[name].inputs if i in self.nodes]
        found = [*inputs, *self.users[name]]
        if len(found) > _HUB:
            found.sort(key=lambda n: abs(self.position[n] - self.position[name]))
        return found[:_HUB]

    def passable(self, name: str) -> bool:
        """Whether two places that meet at ``name`` are near to each other: not if all the graph meets there."""
        node = self.nodes[name]
        return node.target not in ("placeholder", "get_attr", "output") and len(node.inputs) + len(self.users[name]) <= _HUB

    def around(self, names: Iterable[str]) -> set[str]:
        """The nodes within :data:`HOPS` of ``names``."""
        reached = {n for n in names if n in self.nodes}
        rim = set(reached)
        for hop in range(HOPS):
            rim = {n for r in rim if hop == 0 or self.passable(r) for n in self.near(r)} - reached
            reached |= rim
        return reached

    def ordered(self, names: Iterable[str]) -> list[GraphNode]:
        return [self.nodes[n] for n in sorted(names, key=self.position.__getitem__)]


def scenes(graph: GraphCode, marks: Sequence[Mark], largest: int = 40) -> tuple[list[Scene], int]:
    """Cuts a graph into scenes, in topological order.

    Args:
        graph: with its nodes.
        marks: what to show of it.
        largest: the greatest number of scenes; further ones are left out.

    Returns:
        The scenes, and how many of the marks are on none.
    """
    before, after = Side(graph.nodes_before), Side(graph.nodes_after)
    marks = [m for m in marks if any(n in before.nodes for n in m.before) or any(n in after.nodes for n in m.after)]
    if not marks:
        return [], 0
    if len(graph.nodes_before) <= WHOLE:
        return [Scene(list(marks), list(graph.nodes_before), list(graph.nodes_after))], 0

    drawn: dict[tuple, Scene] = {}
    left_out = 0
    for group, old, new in _grouped(marks, before, after):
        scene = Scene(group, before.ordered(old), after.ordered(new))
        look = _look(scene)
        if look in drawn:
            drawn[look].alike.append(group)
        elif len(drawn) < largest:
            drawn[look] = scene
        else:
            left_out += len(group)
    found = list(drawn.values())
    _count_elided(found, before)
    return found, left_out


def _grouped(marks: Sequence[Mark], before: Side, after: Side) -> list[tuple[list[Mark], set[str], set[str]]]:
    def first(mark: Mark) -> int:
        return min((before.position[n] for n in mark.before if n in before.position), default=0)

    groups: list[tuple[list[Mark], set[str], set[str]]] = []
    for mark in sorted(marks, key=first):
        old = before.around(mark.before)
        # What stands around the old nodes is shown on both sides, so that the eye finds its way from one to the other.
        new = after.around(mark.after) | {n for n in old if n in after.nodes}
        if groups:
            last, last_old, last_new = groups[-1]
            meet = any(before.passable(n) for n in old & last_old)
            if meet and len(old | last_old) <= _LARGEST:
                groups[-1] = ([*last, mark], last_old | old, last_new | new)
                continue
        groups.append(([mark], old, new))
    return groups


def _look(scene: Scene) -> tuple:
    """Equal for scenes whose drawings are equal but for the nodes' names."""

    def side(nodes: list[GraphNode], which: str) -> tuple:
        index = {n.name: i for i, n in enumerate(nodes)}
        marked = {n: (m.kind, m.pattern, m.label) for m in scene.marks for n in getattr(m, which)}
        return tuple((n.target, n.spec, marked.get(n.name), tuple(index.get(i, -1) for i in n.inputs)) for n in nodes)

    return side(scene.before, "before"), side(scene.after, "after")


def _count_elided(found: list[Scene], before: Side) -> None:
    shown = {n.name for s in found for n in s.before}
    starts = [min((before.position[n] for m in s.marks for n in m.before if n in before.position), default=0) for s in found]
    hidden = [i for n, i in before.position.items() if n not in shown]
    for scene, low, high in zip(found, [-1, *starts], starts):
        scene.elided = sum(low < i < high for i in hidden)
