"""A report as one HTML page that needs nothing else: no network, no library, no server.

Every place has an identifier made of numbers, and every text from the program is escaped; a Content-Security-Policy
lets only this file's own script run, so a hostile name in a graph stays a name.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import html
import linecache
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fusebackend.report.html import code
from fusebackend.report.html.drawing import Drawing
from fusebackend.report.html.neighbourhoods import HOPS, Mark, Scene, scenes
from fusebackend.rewriting.outcome import GraphCode, Rejection, Source, Substitution

if TYPE_CHECKING:
    from fusebackend.report.model import Report

_CONTEXT = 2  # lines of the user's file around the one that is shown
_FEW = 8  # places named in a row before the rest folds


def page(report: Report) -> str:
    """The page of ``report``."""
    here = Path(__file__)
    style, script = (here.with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(_headline(report))}</title>",
            f"<style>{style}</style></head><body>",
            *_Page(report).body(),
            f"<script>{script}</script></body></html>",
            "",
        ]
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _headline(report: Report) -> str:
    return str(report).split("\n")[0]


class _Page:
    """Rows, marks and identifiers of one page; the parts refer to each other by them."""

    def __init__(self, report: Report):
        self.report = report
        self.patterns = sorted({x.pattern for x in (*report.substitutions, *report.rejections)})
        self.subs = _grouped(report.substitutions, lambda s: (s.pattern, s.graph, s.source, s.inputs, s.outputs, s.note, s.replacement))
        self.misses = _grouped(report.rejections, lambda r: (r.pattern, r.reason))
        # Of a substitution or rejection, by its id(): where it is drawn, and whether as itself or by one that looks alike.
        self.places: dict[int, tuple[str, bool]] = {}
        self.marks: dict[str, list[tuple[Substitution | Rejection, Mark]]] = collections.defaultdict(list)
        for number, group in enumerate(self.subs):
            for s in group:
                mark = Mark(f"s{number}", "sub", s.pattern, "", s.replaced_nodes or (s.node,), s.new_nodes)
                self.marks[s.graph].append((s, mark))
        for number, group in enumerate(self.misses):
            for r in group:
                self.marks[r.graph].append((r, Mark(f"m{number}", "miss", r.pattern, r.reason, (r.node,), (r.node,))))

    def body(self) -> Iterable[str]:
        # The graphs first: the tables link to where they drew each place.
        graphs = [line for number, graph in enumerate(self.report.graphs) for line in self.graph(number, graph)]
        yield from self.summary()
        if self.patterns:
            yield from self.filters()
        if self.subs:
            yield from self.substitutions()
        if self.misses:
            yield from self.near_misses()
        if self.report.verdicts:
            yield from self.verdicts()
        if "<svg" in "".join(graphs):
            yield (
                '<h2>Graphs</h2><p class="dim"><span class="tag gone">replaced</span> <span class="tag sub">new</span> '
                '<span class="tag miss">near miss</span> · dotted stubs lead to nodes that are not drawn · a node leads to its line of '
                "code, a name in the code to its node, ◆ to the row of the table.</p>"
            )
        yield from graphs

    def summary(self) -> Iterable[str]:
        report = self.report
        tiles = [
            ("sub", len(report.substitutions), "substitutions"),
            ("miss", len(report.rejections), "near misses"),
            ("", len(report.graphs), "graphs"),
            ("", f"{sum(g.nodes for g in report.graphs):,}", "nodes"),
            ("", f"{report.seconds * 1e3:,.0f} ms", "added to the compile"),
            ("", "cache" if report.from_cache else "fresh", "where the compiled code is from"),
        ]
        yield "<h1>fusebackend report</h1>"
        yield '<div class="tiles">'
        yield from (f'<div class="tile {kind}"><b>{_text(figure)}</b>{what}</div>' for kind, figure, what in tiles)
        yield "</div>"
        if report.notes:
            yield f'<ul class="notes">{"".join(f"<li>{_text(n)}</li>" for n in report.notes)}</ul>'

    def filters(self) -> Iterable[str]:
        counts = self.report.counts()
        missed = collections.Counter(r.pattern for r in self.report.rejections)
        yield '<nav aria-label="Patterns to show">'
        for number, name in enumerate(self.patterns):
            yield (
                f'<button type="button" data-filter="p{number}" aria-pressed="true">{_text(name)} '
                f'<span class="tag sub">{counts.get(name, 0)}</span> <span class="tag miss">{missed[name]}</span></button>'
            )
        yield "</nav>"

    def substitutions(self) -> Iterable[str]:
        yield f'<h2>Substitutions <small data-count="subs">{len(self.report.substitutions)}</small></h2>'
        yield '<div class="scroll"><table id="subs"><thead>'
        yield f"<tr>{_cells('th', 'Pattern', 'Your line', 'Operators', 'Shapes', 'Drawn')}</tr></thead><tbody>"
        for number, group in enumerate(self.subs):
            s = group[0]
            went = f'<div class="was mono">{_operators(s.replaced)}</div><div class="now mono">{_operators(s.replacement)}</div>'
            shapes = f'<span class="mono">{_text(", ".join(s.inputs))} → {_text(", ".join(s.outputs))}</span>'
            cells = (_source(s.source), f"{went}<div>{_text(s.note)}</div>", shapes, self.place_links(group))
            yield self.row(f"s{number}", "sub", group, *cells)
        yield "</tbody></table></div>"

    def near_misses(self) -> Iterable[str]:
        yield f'<h2>Near misses <small><span data-count="misses">{len(self.report.rejections)}</span>, left to Inductor</small></h2>'
        yield '<div class="scroll"><table id="misses"><thead>'
        yield f"<tr>{_cells('th', 'Pattern', 'Why not', 'Your lines', 'Drawn')}</tr></thead><tbody>"
        for number, group in enumerate(self.misses):
            lines = [_source(source) for source in dict.fromkeys(r.source for r in group)]
            yield self.row(f"m{number}", "miss", group, _text(group[0].reason), _folded(lines, 3, ""), self.place_links(group))
        yield "</tbody></table></div>"

    def verdicts(self) -> Iterable[str]:
        groups = _grouped(self.report.verdicts, lambda v: (v.pattern, v.graph, v.source, v.applied, v.replaced_ms, v.inductor_ms))
        yield '<h2>Timed by the gate</h2><div class="scroll"><table id="verdicts"><thead>'
        yield f"<tr>{_cells('th', 'Pattern', 'Graph', 'Your line', 'Verdict')}</tr></thead><tbody>"
        for group in groups:
            v = group[0]
            times = f" ×{len(group)}" if len(group) > 1 else ""
            cells = (_text(v.pattern or "(all)") + times, _text(v.graph), _source(v.source), _text(str(v)))
            yield f"<tr>{_cells('td', *cells)}</tr>"
        yield "</tbody></table></div>"

    def row(self, row: str, kind: str, group: list, *cells: str) -> str:
        times = f' <span class="tag {kind}">×{len(group)}</span>' if len(group) > 1 else ""
        pattern = self.patterns.index(group[0].pattern)
        first = f"<b>{_text(group[0].pattern)}</b>{times}"
        return f'<tr id="{row}" data-p="p{pattern}" data-n="{len(group)}">{_cells("td", first, *cells)}</tr>'

    def place_links(self, group: list) -> str:
        """By graph: the nodes that are drawn, then the pictures that stand for the others."""
        by_graph: dict[str, dict[tuple[str, str], int]] = collections.defaultdict(collections.Counter)
        for x in group:
            place, exact = self.places.get(id(x), ("", False))
            by_graph[x.graph][place, x.node if exact else "alike" if place else "not drawn"] += 1
        rows = []
        for graph, places in by_graph.items():
            links = [f'<span class="dim">{_text(graph)}</span>']
            for (place, name), times in places.items():
                name = _text(name) + (f" ×{times}" if times > 1 else "")
                links.append(f'<a class="mono" href="#{place}">{name}</a>' if place else f'<span class="dim">{name}</span>')
            rows.append(_folded(links, _FEW, "places"))
        return "".join(rows)

    def graph(self, number: int, graph: GraphCode) -> Iterable[str]:
        own = self.marks[graph.name]
        count = f"{graph.nodes:,} nodes"
        yield f'<h2 id="g{number}">{_text(graph.name)} <small>{count}</small></h2>'
        if not graph.nodes_before:
            why = "this report does not hold its nodes" if own else "nothing that any pattern looks for"
            yield f'<p class="dim">Not drawn: {why}.</p>'
            return
        found, left_out = scenes(graph, [m for _, m in own])
        scene_of = {m: i for i, s in enumerate(found) for marks in (s.marks, *s.alike) for m in marks}
        shown = {m for s in found for m in s.marks}
        drawing = Drawing(number, graph, [m for _, m in own], found)
        for what, mark in own:
            scene = scene_of.get(mark)
            if scene is not None:
                exact = drawing.place(mark) if mark in shown else None
                self.places[id(what)] = (exact or f"g{number}v{scene}", exact is not None)
        if any(s.elided for s in found) or len(graph.nodes_before) > sum(len(s.before) for s in found):
            yield f'<p class="dim">Drawn is what stands within {HOPS} steps of a rewritten or nearly rewritten node.</p>'
        for index, scene in enumerate(found):
            if scene.elided:
                yield f'<p class="elided">… {_nodes(scene.elided)} …</p>'
            yield from self.scene(number, index, scene, drawing)
        hidden = len(graph.nodes_before) - len({n.name for s in found for n in s.before}) - sum(s.elided for s in found)
        if hidden > 0:
            yield f'<p class="elided">… {_nodes(hidden)} …</p>'
        if left_out:
            yield f'<p class="elided">{left_out} more places, which look different from these, are in the code and the tables only.</p>'
        yield from code.panels(graph, drawing)

    def scene(self, number: int, index: int, scene: Scene, drawing: Drawing) -> Iterable[str]:
        patterns = sorted({self.patterns.index(m.pattern) for m in scene.marks})
        yield f'<section class="scene" id="g{number}v{index}" data-p="{" ".join(f"p{p}" for p in patterns)}"><header>'
        rows = collections.Counter((m.row, m.kind, m.pattern, m.label) for m in scene.marks)
        for (row, kind, pattern, label), times in rows.items():
            what = f"{pattern}{f' ×{times}' if times > 1 else ''}"
            yield f'<span><a class="tag {kind}" href="#{row}">{_text(what)}</a> <span class="dim">{_text(label)}</span></span>'
        if scene.alike:
            yield f'<span class="dim">… and {len(scene.alike)} more that look the same</span>'
        changed = any(m.kind == "sub" for m in scene.marks)
        yield f'</header><div class="sides{"" if changed else " one"}">'
        yield f'<div class="side"><h3>{"Before" if changed else "Unchanged"}</h3>{drawing.side("b", index)}</div>'
        if changed:
            yield f'<div class="side"><h3>After</h3>{drawing.side("a", index)}</div>'
        yield "</div></section>"


def _cells(tag: str, *cells: str) -> str:
    return "".join(f"<{tag}>{c}</{tag}>" for c in cells)


def _operators(names: Iterable[str]) -> str:
    return _text(" ".join(n.removesuffix(".default") for n in names))


def _nodes(count: int) -> str:
    return f"{count:,} node{'' if count == 1 else 's'}"


def _grouped(items: list, key) -> list[list]:
    groups = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _folded(parts: list[str], few: int, what: str) -> str:
    """The parts in lines or a row, all but a few folded away."""
    kind = "places" if what else ""
    shown = f'<div class="{kind}">{"".join(parts[:few])}</div>'
    if len(parts) > few:
        shown += f'<details><summary>{len(parts) - few} more</summary><div class="{kind}">{"".join(parts[few:])}</div></details>'
    return shown


def _source(source: Source) -> str:
    """A line of the user's program, with those around it where the file still has it."""
    if not source.file:
        return '<div class="dim">(no source line)</div>'
    head = (
        f'<div title="{_text(source.file)}"><code>{_text(source.short)}</code> <span class="dim">in {_text(source.function)}</span></div>'
    )
    if linecache.getline(source.file, source.line).strip() != source.code or not source.code:
        return f'{head}<pre class="snippet"><b>{_text(source.code)}</b></pre>' if source.code else head
    first = max(1, source.line - _CONTEXT)
    near = [linecache.getline(source.file, i) for i in range(first, source.line + _CONTEXT + 1)]
    near = textwrap.dedent("".join(near)).rstrip("\n").split("\n")
    lines = [f"{first + i:4}  {_text(line)}" for i, line in enumerate(near)]
    at = source.line - first
    around = "\n".join([*lines[:at], f"<b>{lines[at]}</b>", *lines[at + 1 :]])
    code = f"<summary><code>{_text(source.code)}</code></summary>"
    return f'{head}<details>{code}<pre class="snippet">{around}</pre></details>'
