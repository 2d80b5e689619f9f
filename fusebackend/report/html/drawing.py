"""What one graph's drawing, code and table rows call each other: identifiers, marks, and which scene a node belongs to."""

from __future__ import annotations

from fusebackend.report.html.code import Listing
from fusebackend.report.html.neighbourhoods import Mark, Scene, Side
from fusebackend.report.html.svg import svg
from fusebackend.rewriting.outcome import GraphCode


class Drawing:
    """The identifiers and marks of one graph's nodes, on both sides (``"b"`` before, ``"a"`` after)."""

    def __init__(self, number: int, graph: GraphCode, marks: list[Mark], found: list[Scene]):
        self.number = number
        self.name = graph.name
        self.found = found
        self.sides = {"b": Side(graph.nodes_before), "a": Side(graph.nodes_after)}
        self.marked: dict[tuple[str, str], Mark] = {}
        for mark in sorted(marks, key=lambda m: m.kind == "sub"):  # a substitution's colour covers a near miss's
            self.marked.update({("b", n): mark for n in mark.before} | {("a", n): mark for n in mark.after})
        # A node may stand in several scenes; its identifier belongs to the one that it is marked in, else to the first.
        self.home: dict[tuple[str, str], int] = {}
        for index, scene in enumerate(found):
            for mark in scene.marks:
                for key in [*(("b", n) for n in mark.before), *(("a", n) for n in mark.after)]:
                    self.home.setdefault(key, index)
        for index, scene in enumerate(found):
            for side, nodes in (("b", scene.before), ("a", scene.after)):
                for node in nodes:
                    self.home.setdefault((side, node.name), index)
        self.listings = {
            side: Listing.of(code, self.sides[side].nodes, lambda n, s=side: (s, n) in self.marked, lambda n, s=side: self.is_drawn(s, n))
            for side, code in (("b", graph.before), ("a", graph.after))
        }

    def identifier(self, side: str, name: str) -> str:
        return f"g{self.number}{side}{self.sides[side].position[name]}"

    def is_drawn(self, side: str, name: str) -> bool:
        index = self.home.get((side, name))
        if index is None or name not in self.sides[side].nodes:
            return False
        return side == "b" or any(m.kind == "sub" for m in self.found[index].marks)

    def place(self, mark: Mark) -> str | None:
        """The identifier of the first of the mark's nodes that is drawn."""
        return next((self.identifier("b", n) for n in mark.before if self.is_drawn("b", n)), None)

    def classes(self, side: str, name: str) -> str:
        mark = self.marked.get((side, name))
        if mark is None:
            return ""
        return "gone" if mark.kind == "sub" and side == "b" else mark.kind

    def side(self, side: str, index: int) -> str:
        scene = self.found[index]
        return svg(
            scene.before if side == "b" else scene.after,
            title=f"Part of the graph {self.name}, {'before' if side == 'b' else 'after'} rewriting",
            users=self.sides[side].users,
            classes=lambda n: self.classes(side, n),
            identifier=lambda n: self.identifier(side, n) if self.home.get((side, n)) == index else None,
            link=lambda n: f"{self.identifier(side, n)}c" if n in self.listings[side] else None,
        )
