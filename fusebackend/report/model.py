"""The report of one compile: what was rewritten, what was not and why."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusebackend.native.kept_files import decoded
from fusebackend.report.coverage import Coverage, coverage
from fusebackend.report.text import report_text
from fusebackend.rewriting.outcome import GraphBreak, GraphCode, GraphNode, Rejection, Source, Substitution, Verdict

if TYPE_CHECKING:
    from fusebackend.report.comparison import Comparison

__all__ = ["Coverage", "GraphBreak", "GraphCode", "GraphNode", "Rejection", "Report", "Source", "Substitution", "Verdict"]

#: The number of what :meth:`Report.to_dict` gives; reports without one are of the version before.
SCHEMA = 2

#: What :meth:`Report.save` writes.
SUFFIXES = (".html", ".json")


@dataclasses.dataclass
class Report:
    """The report of one compile, or of all the compiles of one :func:`fusebackend.explain`.

    Attributes:
        substitutions, rejections, graphs, verdicts: see their classes.
        from_cache: the compiled code came from Inductor's cache, and this report from the compile that filled it.
        notes: what concerns the whole compile, e.g. that there is no native library.
        seconds: the time that this backend added to the compile, without Inductor's own.
        breaks: where Dynamo ended a graph before its function returned, and why.
        context: versions, device, options and date of the compile, by name; empty in reports kept by older versions.
    """

    substitutions: list[Substitution] = dataclasses.field(default_factory=list)
    rejections: list[Rejection] = dataclasses.field(default_factory=list)
    graphs: list[GraphCode] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    from_cache: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    breaks: list[GraphBreak] = dataclasses.field(default_factory=list)
    context: dict[str, str] = dataclasses.field(default_factory=dict)

    def extend(self, other: Report) -> None:
        """Adds the graphs and notes of another compile. The context stays that of the first."""
        self.substitutions += other.substitutions
        self.rejections += other.rejections
        self.graphs += other.graphs
        self.verdicts += other.verdicts
        self.notes += [n for n in other.notes if n not in self.notes]
        self.from_cache = self.from_cache or other.from_cache
        self.seconds += other.seconds
        self.breaks += other.breaks
        self.context = self.context or dict(other.context)

    def counts(self) -> dict[str, int]:
        """Number of substitutions by pattern."""
        return dict(collections.Counter(s.pattern for s in self.substitutions))

    def coverage(self) -> Coverage | None:
        """What part of the program was rewritten; None if this report was kept by a version that did not count."""
        return coverage(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and strings, as JSON takes them; README.md beside this file describes them.

        The nodes' ``source`` is an index into ``sources``: thousands of nodes come from a few lines.
        """
        sources: dict[Source, int] = {}

        def plain(node: GraphNode) -> dict[str, Any]:
            found = {**vars(node), "inputs": list(node.inputs), "source": sources.setdefault(node.source, len(sources))}
            return found if node.label else {k: v for k, v in found.items() if k != "label"}

        graphs = [
            {**vars(c), "nodes_before": [*map(plain, c.nodes_before)], "nodes_after": [*map(plain, c.nodes_after)]} for c in self.graphs
        ]
        covered = self.coverage()
        return {
            "schema": SCHEMA,
            "context": dict(self.context),
            "coverage": _plain(covered),
            "substitutions": _plain(self.substitutions),
            "rejections": _plain(self.rejections),
            "graphs": graphs,
            "verdicts": _plain(self.verdicts),
            "breaks": _plain(self.breaks),
            "from_cache": self.from_cache,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "sources": [dict(vars(s)) for s in sources],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that :meth:`to_dict` was called on, by this version or an earlier one.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: this is no report.
        """
        schema = decoded(int, data.get("schema", 1))
        if schema > SCHEMA:
            raise ValueError(f"a report of schema {schema}, which a later version wrote; this one reads {SCHEMA} and before")
        decoded(Coverage | None, data.get("coverage"))  # which follows from the rest
        sources = decoded(list[Source], data["sources"])

        def node(item: dict[str, Any]) -> GraphNode:  # thousands of them: not by `decoded`
            name, target, spec, inputs, label = item["name"], item["target"], item["spec"], item["inputs"], item.get("label", "")
            if type(inputs) is not list or not all(type(text) is str for text in (name, target, spec, label, *inputs)):
                raise TypeError(f"a node of {name}, {target}, {spec}, {label}, {inputs}")
            return GraphNode(name, target, tuple(inputs), spec, sources[item["source"]], label)

        def graph(item: dict[str, Any]) -> GraphCode:
            before = tuple(map(node, item["nodes_before"]))
            known = {old["name"]: (old, made) for old, made in zip(item["nodes_before"], before)}

            def after(new: dict[str, Any]) -> GraphNode:  # most nodes are as they were
                old, made = known.get(new["name"], (None, None))
                return made if made is not None and new == old else node(new)

            nodes = {"nodes_before": before, "nodes_after": tuple(map(after, item["nodes_after"]))}
            return dataclasses.replace(decoded(GraphCode, {k: v for k, v in item.items() if k not in nodes}), **nodes)

        return cls(
            decoded(list[Substitution], data["substitutions"]),
            decoded(list[Rejection], data["rejections"]),
            [graph(c) for c in data["graphs"]],
            decoded(list[Verdict], data["verdicts"]),
            decoded(bool, data["from_cache"]),
            decoded(list[str], data["notes"]),
            decoded(float, data["seconds"]),
            decoded(list[GraphBreak], data.get("breaks", [])),
            decoded(dict[str, str], data.get("context", {})),
        )

    def save(self, path: str | os.PathLike[str], compared: Comparison | None = None) -> Path:
        """Writes the report: ``.html``, a page of its own with the graphs drawn before and after; ``.json``, :meth:`to_dict`.

        Args:
            compared: with an earlier report (:func:`fusebackend.report.comparison.compare`), to be shown on the page.

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise ValueError(f"a report is saved as {' or '.join(SUFFIXES)}, got {str(path)!r}")
        if path.suffix == ".json":
            text = json.dumps(self.to_dict())
        else:
            from fusebackend.report.html.page import page

            text = page(self, compared)
        path.write_text(text, encoding="utf-8")
        return path

    def __str__(self) -> str:
        return report_text(self)


def _plain(value: Any) -> Any:
    """With dicts for dataclasses, and lists for tuples, as what JSON gives back."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
