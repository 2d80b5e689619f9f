"""A graph's code: which of its lines are shown, and which node each of them computes."""

from __future__ import annotations

import dataclasses
import re

from fusebackend.report.html.identifiers import GraphIdentifiers, Side
from fusebackend.report.html.neighbourhoods import Mark

_MAX_LINES_SHOWN_WHOLE = 200
_CONTEXT_LINES = 3  # around each marked line of longer code
_MAX_LINES = 3000
_MAX_CHARACTERS = 400  # of a line
_ASSIGNMENT = re.compile(r'\s+(?P<name>\w+)(?:: "[^"]*")? = ')


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of code, or a gap of ``skipped`` lines.

    Attributes:
        indent, name, rest: the line's text. ``name`` is what links to the drawing; empty where nothing does.
        identifier: of a line that computes a node.
        drawing: the identifier of the node in its drawing, or empty.
        mark: what the page says about the node.
        css_class: empty, ``"remark"`` for a comment, or that of the marked node.
    """

    indent: str = ""
    name: str = ""
    rest: str = ""
    identifier: str = ""
    drawing: str = ""
    mark: Mark | None = None
    css_class: str = ""
    skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Listing:
    """The rows of one side's code, and the names of the nodes whose lines are among them."""

    rows: list[Row]
    nodes: frozenset[str]


def listing(code: str, side: Side, identifiers: GraphIdentifiers) -> Listing:
    """Short code is listed whole. Of long code, the lines of drawn nodes and those around marked nodes are listed."""
    lines = code.rstrip("\n").split("\n")
    nodes = identifiers.graphs[side].nodes
    names: list[str | None] = []
    seen = set()
    for line in lines:
        name = _computed_node(line)
        names.append(name if name in nodes and name not in seen else None)
        seen.add(name)
    shown = range(len(lines)) if len(lines) <= _MAX_LINES_SHOWN_WHOLE else _selected(names, side, identifiers)
    rows = []
    end = 0
    for i in shown:
        if i > end:
            rows.append(Row(skipped=i - end))
        rows.append(_row(lines[i], names[i], side, identifiers))
        end = i + 1
    if end < len(lines):
        rows.append(Row(skipped=len(lines) - end))
    return Listing(rows, frozenset(name for i in shown if (name := names[i])))


def _selected(names: list[str | None], side: Side, identifiers: GraphIdentifiers) -> list[int]:
    selected = set()
    for i, name in enumerate(names):
        if name and identifiers.is_drawn(side, name):
            selected.add(i)
        if name and identifiers.mark(side, name):
            selected.update(range(max(0, i - _CONTEXT_LINES), min(len(names), i + _CONTEXT_LINES + 1)))
    return sorted(selected)[:_MAX_LINES]


def _computed_node(line: str) -> str | None:
    found = _ASSIGNMENT.match(line)
    return found["name"] if found else "output" if line.lstrip().startswith("return ") else None


def _row(line: str, name: str | None, side: Side, identifiers: GraphIdentifiers) -> Row:
    if len(line) > _MAX_CHARACTERS:
        line = f"{line[:_MAX_CHARACTERS]} … {len(line) - _MAX_CHARACTERS:,} characters"
    if name is None:
        return Row(rest=line or " ", css_class="remark" if line.lstrip().startswith("#") else "")
    text = line.lstrip()
    first_word = text.split(" ", 1)[0] if identifiers.is_drawn(side, name) else ""
    return Row(
        indent=line[: len(line) - len(text)],
        name=first_word,
        rest=text[len(first_word) :],
        identifier=identifiers.code_line(side, name),
        drawing=identifiers.node(side, name) if first_word else "",
        mark=identifiers.mark(side, name),
        css_class=identifiers.css_class(side, name),
    )
