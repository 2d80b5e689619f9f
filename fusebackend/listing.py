"""A graph's code before and after, side by side, with the lines of rewritten and nearly rewritten nodes marked."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

from .report import GraphCode

_WHOLE = 200  # code up to this many lines is shown whole
_AROUND = 3  # else this many lines around each marked one
_MOST = 3000  # lines a panel
_LONGEST = 400  # characters a line
_ASSIGNS = re.compile(r'\s+(?P<name>\w+)(?:: "[^"]*")? = ')


def panels(graph: GraphCode, drawing: Any) -> Iterable[str]:
    """The two panels as HTML. ``drawing`` knows the nodes' identifiers, marks and places."""
    changed = graph.after != graph.before
    yield f'<details id="g{drawing.number}code"><summary>Code{" before and after" if changed else ""}</summary>'
    yield f'<div class="scene"><div class="sides{"" if changed else " one"}">'
    yield from _panel("Before" if changed else "Unchanged", graph.before, "b", drawing)
    if changed:
        yield from _panel("After", graph.after, "a", drawing)
    yield "</div></div></details>"


def _panel(title: str, code: str, side: str, drawing: Any) -> Iterable[str]:
    lines = code.rstrip("\n").split("\n")
    names = [_node(line, drawing.sides[side].nodes) for line in lines]
    keep = range(len(lines))
    if len(lines) > _WHOLE:
        marked = [i for i, name in enumerate(names) if name and drawing.classes(side, name)]
        drawn = [i for i, name in enumerate(names) if name and drawing.is_drawn(side, name)]
        near = {j for i in marked for j in range(max(0, i - _AROUND), min(len(lines), i + _AROUND + 1))}
        keep = sorted(near | set(drawn))[:_MOST]
    yield f'<div class="side code"><h3>{title}</h3><div class="listing mono">'
    last = -1
    for i in keep:
        if i > last + 1:
            yield _cut(i - last - 1)
        yield _line(lines[i], names[i], side, drawing)
        last = i
    if last + 1 < len(lines):
        yield _cut(len(lines) - last - 1)
    yield "</div></div>"


def _cut(lines: int) -> str:
    return f'<div class="cut">    … {lines:,} line{"" if lines == 1 else "s"} …</div>'


def _node(line: str, nodes: Any) -> str | None:
    found = _ASSIGNS.match(line)
    name = found["name"] if found else "output" if line.lstrip().startswith("return ") else None
    return name if name in nodes else None


def _line(line: str, name: str | None, side: str, drawing: Any) -> str:
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} … {len(line) - _LONGEST:,} characters"
    text = html.escape(line) or " "
    if name is None:
        remark = ' class="remark"' if line.lstrip().startswith("#") else ""
        return f"<div{remark}>{text}</div>"
    identifier = drawing.identifier(side, name)
    if drawing.is_drawn(side, name):
        # The node's own name, at the beginning of its line, leads to the drawing.
        indent = text[: len(text) - len(text.lstrip())]
        word = text.lstrip().split(" ", 1)[0]
        text = f'{indent}<a href="#{identifier}">{word}</a>{text[len(indent) + len(word) :]}'
    mark = drawing.marked.get((side, name))
    if mark is not None:
        text += f'  <a class="tag {mark.kind}" href="#{mark.row}">{html.escape(mark.pattern)}</a>'
    kind = f' class="{drawing.classes(side, name)}"' if mark is not None else ""
    return f'<div{kind} id="{identifier}c">{text}</div>'
