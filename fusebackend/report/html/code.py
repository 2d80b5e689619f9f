"""A graph's code before and after, side by side, with the lines of rewritten and nearly rewritten nodes marked."""

from __future__ import annotations

import dataclasses
import functools
import html
import re
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING

from fusebackend.rewriting.outcome import GraphCode

if TYPE_CHECKING:
    from fusebackend.report.html.drawing import Drawing

_WHOLE = 200  # code up to this many lines is shown whole
_AROUND = 3  # else this many lines around each marked one
_MOST = 3000  # lines a panel
_LONGEST = 400  # characters a line
_ASSIGNS = re.compile(r'\s+(?P<name>\w+)(?:: "[^"]*")? = ')


@dataclasses.dataclass(frozen=True)
class Listing:
    """The lines of one side's code that are shown: each with its number, text, and the node that it computes or None."""

    lines: list[tuple[int, str, str | None]]
    total: int

    @classmethod
    def of(cls, code: str, nodes: Container[str], marked: Callable[[str], bool], drawn: Callable[[str], bool]) -> Listing:
        """All of a short code; of a long one the lines of drawn nodes, and those of marked nodes with what is around them."""
        lines = code.rstrip("\n").split("\n")
        names: list[str | None] = []
        seen = set()
        for line in lines:
            name = _node(line)
            names.append(name if name in nodes and name not in seen else None)
            seen.add(name)
        keep: Iterable[int] = range(len(lines))
        if len(lines) > _WHOLE:
            near = {i for i, name in enumerate(names) if name and drawn(name)}
            for i, name in enumerate(names):
                if name and marked(name):
                    near.update(range(max(0, i - _AROUND), min(len(lines), i + _AROUND + 1)))
            keep = sorted(near)[:_MOST]
        return cls([(i, lines[i], names[i]) for i in keep], len(lines))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str | None]:
        return frozenset(name for _, _, name in self.lines if name)


def panels(graph: GraphCode, drawing: Drawing) -> Iterable[str]:
    """The two panels as HTML. ``drawing`` knows the nodes' identifiers, marks, places and listings."""
    changed = graph.after != graph.before
    yield f'<details id="g{drawing.number}code"><summary>Code{" before and after" if changed else ""}</summary>'
    yield f'<div class="scene"><div class="sides{"" if changed else " one"}">'
    yield from _panel("Before" if changed else "Unchanged", "b", drawing)
    if changed:
        yield from _panel("After", "a", drawing)
    yield "</div></div></details>"


def _panel(title: str, side: str, drawing: Drawing) -> Iterable[str]:
    yield f'<div class="side code"><h3>{title}</h3><div class="listing mono">'
    last = -1
    for i, line, name in drawing.listings[side].lines:
        if i > last + 1:
            yield _cut(i - last - 1)
        yield _line(line, name, side, drawing)
        last = i
    if last + 1 < drawing.listings[side].total:
        yield _cut(drawing.listings[side].total - last - 1)
    yield "</div></div>"


def _cut(lines: int) -> str:
    return f'<div class="cut">    … {lines:,} line{"" if lines == 1 else "s"} …</div>'


def _node(line: str) -> str | None:
    found = _ASSIGNS.match(line)
    return found["name"] if found else "output" if line.lstrip().startswith("return ") else None


def _line(line: str, name: str | None, side: str, drawing: Drawing) -> str:
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
        pattern = html.escape(mark.pattern)
        text = f'<a class="to {mark.kind}" href="#{mark.row}" title="{pattern}" aria-label="{pattern}">◆</a>{text}'
    kind = f' class="{drawing.classes(side, name)}"' if mark is not None else ""
    return f'<div{kind} id="{identifier}c">{text}</div>'
