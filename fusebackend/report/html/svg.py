"""Draws a scene's nodes as inline SVG. Colours are the page's style sheet's; every name is escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

from fusebackend.report.html.layered_layout import Point, layered
from fusebackend.rewriting.outcome import GraphNode

_HEIGHT, _ROW, _MARGIN = 38.0, 66.0, 14.0
_LETTER = 6.7  # width of a letter of the 11 px monospace face
_LONGEST = 34


def svg(
    nodes: Sequence[GraphNode],
    *,
    title: str,
    users: Mapping[str, Sequence[str]],
    classes: Callable[[str], str],
    identifier: Callable[[str], str | None],
    link: Callable[[str], str | None],
) -> str:
    """The drawing of ``nodes``, sources at the top; dashed stubs stand for neighbours that are not drawn.

    Args:
        title: what the picture shows, for screen readers.
        users: the names of every node's users in the whole graph.
        classes: the style classes of a node's box, by its name.
        identifier: the ``id`` that a node gets, or None.
        link: the ``id`` of what a click on a node leads to, or None.
    """
    names = {n.name for n in nodes}
    labels = {n.name: _labels(n) for n in nodes}
    widths = {name: max(map(len, lines)) * _LETTER + 20 for name, lines in labels.items()}
    layout = layered(widths, {n.name: n.inputs for n in nodes}, height=_HEIGHT, row=_ROW)
    width, height = layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN
    number = {n.name: i for i, n in enumerate(nodes)}
    parts = [
        f'<svg style="--w: {width:.0f}px" viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{html.escape(title)}">'
    ]
    for (source, user), points in layout.edges.items():
        parts.append(f'<path class="e" data-a="{number[source]}" data-b="{number[user]}" d="{_curve(points)}"/>')
    for node in nodes:
        x, y = layout.centre[node.name]
        hidden_in = sum(i not in names for i in node.inputs)
        hidden_out = sum(u not in names for u in users.get(node.name, ()))
        for count, edge, away in ((hidden_in, y - _HEIGHT / 2, -1), (hidden_out, y + _HEIGHT / 2, 1)):
            if count:
                aside = x + widths[node.name] / 4  # beside the edges that are drawn
                parts.append(f'<path class="stub" d="M{aside:.1f} {edge:.1f}v{9 * away}"><title>{count} not drawn</title></path>')
                if count > 1:
                    parts.append(f'<text class="count" x="{aside + 4:.1f}" y="{edge + 9 * away + 2:.1f}">{count}</text>')
        box = _box(node, labels[node.name], x, y, widths[node.name])
        name, target = identifier(node.name), link(node.name)
        named = f' id="{name}"' if name else ""
        group = f'<g class="n {classes(node.name)}"{named} data-n="{number[node.name]}">{box}</g>'
        parts.append(f'<a href="#{target}">{group}</a>' if target else group)
    return "".join([*parts, "</svg>"])


def _labels(node: GraphNode) -> tuple[str, str]:
    named = node.target in ("placeholder", "get_attr")
    label = node.name if named else node.target.removesuffix(".default")
    if label.startswith("<"):  # <built-in function getitem>
        label = label.strip("<>").split()[-1]
    return _shortened(label), _shortened(node.spec)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _box(node: GraphNode, labels: tuple[str, str], x: float, y: float, width: float) -> str:
    top, spec = map(html.escape, labels)
    about = html.escape(f"{node.name} = {node.target}({', '.join(node.inputs)})\n{node.spec}\n{node.source}")
    radius = _HEIGHT / 2 if node.target in ("placeholder", "get_attr", "output") else 6
    lines = f'<text x="{x:.1f}" y="{y - 2:.1f}">{top}</text><text class="spec" x="{x:.1f}" y="{y + 12:.1f}">{spec}</text>'
    if not spec:
        lines = f'<text x="{x:.1f}" y="{y + 4:.1f}">{top}</text>'
    return (
        f"<title>{about}</title>"
        f'<rect x="{x - width / 2:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{width:.1f}" height="{_HEIGHT:.0f}" rx="{radius:.0f}"/>{lines}'
    )


def _curve(points: Sequence[Point]) -> str:
    """Vertical at both ends and at every point it passes, so that edges enter boxes from above."""
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        middle = (y0 + y1) / 2
        path.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
    return "".join(path)
