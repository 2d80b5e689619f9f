"""What the page shows of one graph: drawings of its neighbourhoods, and its code before and after rewriting."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

from fusebackend.report.html.code_listing import Listing, listing
from fusebackend.report.html.identifiers import GraphIdentifiers, Side
from fusebackend.report.html.neighbourhoods import HOPS, Mark, Neighbourhood, neighbourhoods
from fusebackend.report.html.svg import Drawing, drawing
from fusebackend.rewriting.outcome import GraphCode


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a site is drawn: ``exact`` if its own node is drawn, not only one that looks alike."""

    identifier: str
    exact: bool


@dataclasses.dataclass(frozen=True)
class Tag:
    """What marks a neighbourhood: a pattern, with a link to the row that is about it."""

    row: str
    kind: str
    pattern: str
    label: str
    count: int


@dataclasses.dataclass(frozen=True)
class NeighbourhoodView:
    """One neighbourhood as the page shows it; ``after`` is None where nothing was rewritten."""

    identifier: str
    patterns: list[str]
    tags: list[Tag]
    alike: int
    skipped: int
    before: Drawing
    after: Drawing | None


@dataclasses.dataclass(frozen=True)
class GraphView:
    """One graph as the page shows it.

    Attributes:
        number: its index in the report.
        nodes: number of nodes.
        not_drawn: why there is neither a drawing nor code; empty if there is.
        hops: the radius of the neighbourhoods where only these are drawn, else None.
        neighbourhoods: what is drawn.
        hidden: number of nodes after the last neighbourhood that are not drawn.
        left_out: number of sites that are not drawn because there are too many.
        before, after: the code; ``after`` is None where nothing was rewritten.
    """

    number: int
    name: str
    nodes: int
    not_drawn: str = ""
    hops: int | None = None
    neighbourhoods: list[NeighbourhoodView] = dataclasses.field(default_factory=list)
    hidden: int = 0
    left_out: int = 0
    before: Listing | None = None
    after: Listing | None = None


def graph_view(
    number: int, graph: GraphCode, marks: Sequence[tuple[Hashable, Mark]], patterns: Sequence[str]
) -> tuple[GraphView, dict[Hashable, Location]]:
    """Prepares one graph.

    Args:
        number: its index in the report.
        graph: the graph.
        marks: the substitutions and near misses in it, each with its mark.
        patterns: the names of all patterns on the page, in order.

    Returns:
        The view, and the location of each substitution and near miss that is drawn.
    """
    if not graph.nodes_before:
        why = "this report does not contain its nodes" if marks else "no pattern found anything in it"
        return GraphView(number, graph.name, graph.nodes, not_drawn=why), {}
    drawn, left_out = neighbourhoods(graph, [mark for _, mark in marks])
    identifiers = GraphIdentifiers(number, graph, [mark for _, mark in marks], drawn)
    listings: dict[Side, Listing] = {"b": listing(graph.before, "b", identifiers), "a": listing(graph.after, "a", identifiers)}
    skipped = sum(d.skipped for d in drawn)
    view = GraphView(
        number,
        graph.name,
        graph.nodes,
        hops=HOPS if skipped or len(graph.nodes_before) > sum(len(d.before) for d in drawn) else None,
        neighbourhoods=[_neighbourhood_view(i, d, graph.name, patterns, identifiers, listings) for i, d in enumerate(drawn)],
        hidden=len(graph.nodes_before) - len({n.name for d in drawn for n in d.before}) - skipped,
        left_out=left_out,
        before=listings["b"],
        after=listings["a"] if graph.after != graph.before else None,
    )
    return view, _locations(marks, drawn, identifiers)


def _neighbourhood_view(
    index: int,
    drawn: Neighbourhood,
    graph_name: str,
    patterns: Sequence[str],
    identifiers: GraphIdentifiers,
    listings: dict[Side, Listing],
) -> NeighbourhoodView:
    def side(which: Side) -> Drawing:
        return drawing(
            drawn.before if which == "b" else drawn.after,
            title=f"Part of the graph {graph_name}, {'before' if which == 'b' else 'after'} rewriting",
            users=identifiers.graphs[which].users,
            css_class=lambda name: identifiers.css_class(which, name),
            identifier=lambda name: identifiers.node(which, name) if identifiers.owner(which, name) == index else None,
            link=lambda name: identifiers.code_line(which, name) if name in listings[which].nodes else None,
        )

    counts = collections.Counter((m.row, m.kind, m.pattern, m.label) for m in drawn.marks)
    return NeighbourhoodView(
        identifier=identifiers.neighbourhood(index),
        patterns=[f"p{i}" for i in sorted({patterns.index(m.pattern) for m in drawn.marks})],
        tags=[Tag(*key, count) for key, count in counts.items()],
        alike=len(drawn.alike),
        skipped=drawn.skipped,
        before=side("b"),
        after=side("a") if any(m.kind == "sub" for m in drawn.marks) else None,
    )


def _locations(
    marks: Sequence[tuple[Hashable, Mark]], drawn: Sequence[Neighbourhood], identifiers: GraphIdentifiers
) -> dict[Hashable, Location]:
    index_of = {m: i for i, d in enumerate(drawn) for group in (d.marks, *d.alike) for m in group}
    shown = {m for d in drawn for m in d.marks}
    found: dict[Hashable, Location] = {}
    for site, mark in marks:
        if mark in index_of:
            exact = identifiers.first_drawn(mark) if mark in shown else None
            found[site] = Location(exact or identifiers.neighbourhood(index_of[mark]), exact is not None)
    return found
