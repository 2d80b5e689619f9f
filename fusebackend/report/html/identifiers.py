"""Where the page shows each node of one graph: the identifiers that its tables, drawings and code listings link to.

Identifiers are made of numbers, never of names from the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fusebackend.report.html.neighbourhoods import IndexedGraph, Mark, Neighbourhood
from fusebackend.rewriting.outcome import GraphCode

#: The graph before (``"b"``) or after (``"a"``) rewriting.
Side = Literal["b", "a"]


class GraphIdentifiers:
    """Identifiers and CSS classes of one graph's nodes.

    Args:
        number: the graph's index in the report.
        graph: the graph, with its nodes.
        marks: what the page says about the graph.
        drawn: the neighbourhoods that are drawn of it.
    """

    def __init__(self, number: int, graph: GraphCode, marks: Sequence[Mark], drawn: Sequence[Neighbourhood]):
        self.number = number
        self.graphs: dict[Side, IndexedGraph] = {"b": IndexedGraph(graph.nodes_before), "a": IndexedGraph(graph.nodes_after)}
        self._drawn = drawn
        self._marks: dict[tuple[Side, str], Mark] = {}
        for mark in sorted(marks, key=lambda m: m.kind == "sub"):  # a substitution takes precedence over a near miss
            self._marks.update({(side, name): mark for side, name in _marked(mark)})
        # A node may be in several neighbourhoods. Its identifier goes to the one where it is marked, else to the first.
        self._owner: dict[tuple[Side, str], int] = {}
        for index, neighbourhood in enumerate(drawn):
            for mark in neighbourhood.marks:
                for key in _marked(mark):
                    self._owner.setdefault(key, index)
        for index, neighbourhood in enumerate(drawn):
            for node in neighbourhood.before:
                self._owner.setdefault(("b", node.name), index)
            for node in neighbourhood.after:
                self._owner.setdefault(("a", node.name), index)

    def node(self, side: Side, name: str) -> str:
        """The identifier of a node in its drawing."""
        return f"g{self.number}{side}{self.graphs[side].position[name]}"

    def code_line(self, side: Side, name: str) -> str:
        """The identifier of the line of code that computes a node."""
        return f"{self.node(side, name)}c"

    def neighbourhood(self, index: int) -> str:
        """The identifier of a neighbourhood."""
        return f"g{self.number}v{index}"

    def owner(self, side: Side, name: str) -> int | None:
        """The index of the neighbourhood in whose drawing the node has its identifier."""
        return self._owner.get((side, name))

    def is_drawn(self, side: Side, name: str) -> bool:
        index = self.owner(side, name)
        if index is None or name not in self.graphs[side].nodes:
            return False
        return side == "b" or any(m.kind == "sub" for m in self._drawn[index].marks)

    def mark(self, side: Side, name: str) -> Mark | None:
        return self._marks.get((side, name))

    def first_drawn(self, mark: Mark) -> str | None:
        """The identifier of the first of the mark's nodes that is drawn."""
        return next((self.node("b", n) for n in mark.before if self.is_drawn("b", n)), None)

    def css_class(self, side: Side, name: str) -> str:
        """``"gone"`` for a replaced node, ``"sub"`` for a new one, ``"miss"`` for a near miss, else empty."""
        mark = self.mark(side, name)
        if mark is None:
            return ""
        return "gone" if mark.kind == "sub" and side == "b" else mark.kind


def _marked(mark: Mark) -> list[tuple[Side, str]]:
    return [*(("b", n) for n in mark.before), *(("a", n) for n in mark.after)]
