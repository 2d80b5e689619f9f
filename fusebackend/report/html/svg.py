"""Coordinates and texts of a neighbourhood's drawing, which the template writes as SVG. Lengths are in pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from fusebackend.report.html.layered_layout import Point, layered
from fusebackend.rewriting.outcome import GraphNode

_BOX_HEIGHT, _LAYER_HEIGHT, _MARGIN = 38.0, 66.0, 14.0
_CHARACTER_WIDTH = 6.7  # of the 11 px monospace font
_MAX_CHARACTERS = 34  # of a label
_STUB_LENGTH = 9
_ROUND = ("placeholder", "get_attr", "output")


@dataclasses.dataclass(frozen=True)
class Edge:
    """An edge between two boxes, given by their numbers. ``path`` is an SVG path."""

    source: int
    user: int
    path: str


@dataclasses.dataclass(frozen=True)
class Stub:
    """A dashed line from a box towards ``count`` neighbours that are not drawn."""

    x: float
    y: float
    length: int
    count: int


@dataclasses.dataclass(frozen=True)
class Box:
    """A node of the graph.

    Attributes:
        number: its index among the boxes of the drawing.
        x, y: its centre.
        label, spec: its two lines of text; ``spec`` may be empty.
        title: its tooltip.
        identifier, link: the ``id`` of the box and of what it links to, or None.
    """

    number: int
    x: float
    y: float
    width: float
    height: float
    radius: float
    label: str
    spec: str
    title: str
    css_class: str
    identifier: str | None
    link: str | None
    stubs: list[Stub]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A drawing whose upper left corner is at (-margin, -margin). ``title`` is for screen readers."""

    title: str
    margin: float
    width: float
    height: float
    edges: list[Edge]
    boxes: list[Box]


def drawing(
    nodes: Sequence[GraphNode],
    *,
    title: str,
    users: Mapping[str, Sequence[str]],
    css_class: Callable[[str], str],
    identifier: Callable[[str], str | None],
    link: Callable[[str], str | None],
) -> Drawing:
    """Lays out ``nodes``, sources at the top.

    Args:
        title: what the drawing shows.
        users: the names of every node's users in the whole graph.
        css_class: the style class of a node, by its name.
        identifier: the ``id`` of a node, or None.
        link: the ``id`` of what a node links to, or None.
    """
    labels = {n.name: (_shortened_label(n), _shortened_spec(n.spec)) for n in nodes}
    widths = {name: max(map(len, lines)) * _CHARACTER_WIDTH + 20 for name, lines in labels.items()}
    layout = layered(widths, {n.name: n.inputs for n in nodes}, box_height=_BOX_HEIGHT, layer_height=_LAYER_HEIGHT)
    numbers = {n.name: i for i, n in enumerate(nodes)}
    boxes = []
    for node in nodes:
        x, y = layout.centre[node.name]
        boxes.append(
            Box(
                number=numbers[node.name],
                x=x,
                y=y,
                width=widths[node.name],
                height=_BOX_HEIGHT,
                radius=_BOX_HEIGHT / 2 if node.target in _ROUND else 6,
                label=labels[node.name][0],
                spec=labels[node.name][1],
                title=f"{node.name} = {node.target}({', '.join(node.inputs)})\n{node.label}\n{node.spec}\n{node.source}".replace(
                    "\n\n", "\n"
                ),
                css_class=css_class(node.name),
                identifier=identifier(node.name),
                link=link(node.name),
                stubs=_stubs(node, x + widths[node.name] / 4, y, numbers, users),
            )
        )
    edges = [Edge(numbers[source], numbers[user], _curve(points)) for (source, user), points in layout.edges.items()]
    return Drawing(title, _MARGIN, layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN, edges, boxes)


def _stubs(node: GraphNode, x: float, y: float, drawn: Mapping[str, int], users: Mapping[str, Sequence[str]]) -> list[Stub]:
    hidden_inputs = sum(i not in drawn for i in node.inputs)
    hidden_users = sum(u not in drawn for u in users.get(node.name, ()))
    above = Stub(x, y - _BOX_HEIGHT / 2, -_STUB_LENGTH, hidden_inputs)
    below = Stub(x, y + _BOX_HEIGHT / 2, _STUB_LENGTH, hidden_users)
    return [stub for stub in (above, below) if stub.count]


def _label(node: GraphNode) -> str:
    if node.target in ("placeholder", "get_attr"):
        return node.label or node.name
    label = node.target.removesuffix(".default")
    return label.strip("<>").split()[-1] if label.startswith("<") else label  # <built-in function getitem>


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"


def _shortened_label(node: GraphNode) -> str:
    """Of a parameter's path the end is shown, which says more than its beginning."""
    label = _label(node)
    return "…" + label[1 - _MAX_CHARACTERS :] if node.label and len(label) > _MAX_CHARACTERS else _shortened(label)


def _shortened_spec(spec: str) -> str:
    """As many whole shapes as there is room for: part of a shape would be another shape. The first is always there."""
    first, *others = spec.split("], ")
    for i, shape in enumerate(others):
        if len(spec) > _MAX_CHARACTERS and len(f"{first}], {shape}], … 1 more") > _MAX_CHARACTERS:
            return f"{first}], … {len(others) - i} more"
        first += f"], {shape}"
    return first


def _curve(points: Sequence[Point]) -> str:
    """An SVG path that is vertical at every point, so that edges enter boxes from above."""
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        middle = (y0 + y1) / 2
        path.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
    return "".join(path)
