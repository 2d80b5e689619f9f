"""The rows of the page's tables: substitutions, near misses, and what the gate timed. Equal ones share a row."""

from __future__ import annotations

import collections
import dataclasses
import linecache
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fusebackend.report.html.graphs import Location
from fusebackend.report.html.neighbourhoods import Mark
from fusebackend.report.module_paths import condensed
from fusebackend.report.text import Gains, gain_text
from fusebackend.rewriting.outcome import Rejection, Source, Substitution

if TYPE_CHECKING:
    from fusebackend.report.model import Report

_CONTEXT_LINES = 2  # of the user's file, around the one that a row is about
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class SnippetLine:
    text: str
    is_current: bool


@dataclasses.dataclass(frozen=True)
class SourceView:
    """A line of the user's program. ``snippet`` holds the lines around it, if the file still has it."""

    source: Source
    snippet: list[SnippetLine]


@dataclasses.dataclass(frozen=True)
class Link:
    """A site in a graph: the name of its node, or words in its place; ``count`` such sites. ``target`` is empty if it is not drawn."""

    name: str
    target: str
    count: int


@dataclasses.dataclass(frozen=True)
class Row:
    """What all tables have.

    Attributes:
        identifier: the row's ``id``.
        pattern, number: the pattern's name, and its index among the patterns of the page.
        count: how many equal items the row stands for.
        sources: the lines of the user's program.
        links: the drawn nodes of each graph, by the graph's name.
        modules, all_modules: the paths of the modules in few words, and all of them.
    """

    identifier: str
    pattern: str
    number: int
    count: int
    modules: str
    all_modules: str
    sources: list[SourceView]
    links: dict[str, list[Link]]


@dataclasses.dataclass(frozen=True)
class SubstitutionRow(Row):
    replaced: str
    replacement: str
    note: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gain: str


@dataclasses.dataclass(frozen=True)
class NearMissRow(Row):
    reason: str


@dataclasses.dataclass(frozen=True)
class VerdictRow:
    pattern: str
    graph: str
    source: SourceView
    modules: str
    all_modules: str
    gain: str
    verdict: str
    count: int


class Tables:
    """The rows of one report, and the marks by which its graphs refer to them."""

    def __init__(self, report: Report):
        self.patterns = sorted({s.pattern for s in report.substitutions} | {r.pattern for r in report.rejections})
        self._substitutions = _grouped(
            report.substitutions, lambda s: (s.pattern, s.graph, s.source, s.inputs, s.outputs, s.note, s.replacement)
        )
        self._near_misses = _grouped(report.rejections, lambda r: (r.pattern, r.reason))
        self._gains = Gains(report)
        self._verdicts = _grouped(report.verdicts, lambda v: (v.pattern, v.graph, v.source, v.applied, v.replaced_ms, v.inductor_ms))

    def marks(self) -> dict[str, list[tuple[Hashable, Mark]]]:
        """The substitutions and near misses of each graph, each with its mark."""
        found: dict[str, list[tuple[Hashable, Mark]]] = collections.defaultdict(list)
        for number, substitutions in enumerate(self._substitutions):
            for s in substitutions:
                mark = Mark(f"s{number}", "sub", s.pattern, "", s.replaced_nodes or (s.node,), s.new_nodes)
                found[s.graph].append((s, mark))
        for number, near_misses in enumerate(self._near_misses):
            for r in near_misses:
                found[r.graph].append((r, Mark(f"m{number}", "miss", r.pattern, r.reason, (r.node,), (r.node,))))
        return found

    def substitutions(self, locations: Mapping[Hashable, Location]) -> list[SubstitutionRow]:
        """The rows of the substitutions, with links to ``locations``, where they are drawn."""
        return [
            SubstitutionRow(
                **self._row(f"s{number}", group, locations),
                replaced=_operators(group[0].replaced),
                replacement=_operators(group[0].replacement),
                note=group[0].note,
                inputs=group[0].inputs,
                outputs=group[0].outputs,
                gain=_range(map(self._gains.of, group)),
            )
            for number, group in enumerate(self._substitutions)
        ]

    def near_misses(self, locations: Mapping[Hashable, Location]) -> list[NearMissRow]:
        """The rows of the near misses, with links to ``locations``, where they are drawn."""
        return [
            NearMissRow(**self._row(f"m{number}", group, locations), reason=group[0].reason)
            for number, group in enumerate(self._near_misses)
        ]

    def verdicts(self) -> list[VerdictRow]:
        return [
            VerdictRow(
                g[0].pattern or "(all)",
                g[0].graph,
                source_view(g[0].source),
                condensed(v.module for v in g),
                _lines(v.module for v in g),
                gain_text(g[0]),
                str(g[0]),
                len(g),
            )
            for g in self._verdicts
        ]

    def _row(self, identifier: str, group: Sequence[Substitution | Rejection], locations: Mapping[Hashable, Location]) -> dict:
        pattern = group[0].pattern
        return dict(
            identifier=identifier,
            pattern=pattern,
            number=self.patterns.index(pattern),
            count=len(group),
            modules=condensed(x.module for x in group),
            all_modules=_lines(x.module for x in group),
            sources=[source_view(source) for source in dict.fromkeys(x.source for x in group)],
            links=_links(group, locations),
        )


def _links(group: Sequence[Substitution | Rejection], locations: Mapping[Hashable, Location]) -> dict[str, list[Link]]:
    counts: dict[str, dict[tuple[str, str], int]] = collections.defaultdict(collections.Counter)
    for item in group:
        location = locations.get(item)
        if location is None:
            counts[item.graph]["not drawn", ""] += 1
        else:
            counts[item.graph][item.node if location.exact else "alike", location.identifier] += 1
    return {graph: [Link(*key, count) for key, count in links.items()] for graph, links in counts.items()}


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    groups: dict[Hashable, list[_Item]] = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _operators(names: Iterable[str]) -> str:
    return " ".join(n.removesuffix(".default") for n in names)


def _lines(modules: Iterable[str]) -> str:
    return "\n".join(dict.fromkeys(m for m in modules if m))


def _range(gains: Iterable[str]) -> str:
    """``1.20x to 1.83x faster than Inductor, timed``, or the one gain that all have; ``estimated`` where one is."""
    found = sorted({g for g in gains if g}, key=lambda g: float(g.strip("~x")))
    if not found:
        return ""
    how = "estimated" if any(g.startswith("~") for g in found) else "timed"
    least, most = found[0].strip("~"), found[-1].strip("~")
    return f"{least if least == most else f'{least} to {most}'} faster than Inductor, {how}"


def source_view(source: Source) -> SourceView:
    """A line of the user's program, with the lines around it if the file still has it."""
    if not source.code or linecache.getline(source.file, source.line).strip() != source.code:
        return SourceView(source, [])
    first = max(1, source.line - _CONTEXT_LINES)
    lines = [linecache.getline(source.file, i) for i in range(first, source.line + _CONTEXT_LINES + 1)]
    lines = textwrap.dedent("".join(lines)).rstrip("\n").split("\n")
    return SourceView(source, [SnippetLine(f"{i:4}  {line}", i == source.line) for i, line in enumerate(lines, first)])
