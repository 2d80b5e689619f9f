"""The report of one compile: what was rewritten, what was not and why."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from fusebackend.native.kept_files import decoded
from fusebackend.report.text import report_text
from fusebackend.rewriting.outcome import GraphCode, GraphNode, Rejection, Source, Substitution, Verdict

__all__ = ["GraphCode", "GraphNode", "Rejection", "Report", "Source", "Substitution", "Verdict"]

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
    """

    substitutions: list[Substitution] = dataclasses.field(default_factory=list)
    rejections: list[Rejection] = dataclasses.field(default_factory=list)
    graphs: list[GraphCode] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    from_cache: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def extend(self, other: Report) -> None:
        """Adds the graphs and notes of another compile."""
        self.substitutions += other.substitutions
        self.rejections += other.rejections
        self.graphs += other.graphs
        self.verdicts += other.verdicts
        self.notes += [n for n in other.notes if n not in self.notes]
        self.from_cache = self.from_cache or other.from_cache
        self.seconds += other.seconds

    def counts(self) -> dict[str, int]:
        """Number of substitutions by pattern."""
        return dict(collections.Counter(s.pattern for s in self.substitutions))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and strings, as JSON takes them.

        The nodes' ``source`` is an index into ``sources``: thousands of nodes come from a few lines.
        """
        sources: dict[Source, int] = {}

        def plain(node: GraphNode) -> dict[str, Any]:
            return {**vars(node), "inputs": list(node.inputs), "source": sources.setdefault(node.source, len(sources))}

        graphs = [
            {**vars(c), "nodes_before": [*map(plain, c.nodes_before)], "nodes_after": [*map(plain, c.nodes_after)]} for c in self.graphs
        ]
        return {
            "substitutions": [dataclasses.asdict(s) for s in self.substitutions],
            "rejections": [dataclasses.asdict(r) for r in self.rejections],
            "graphs": graphs,
            "verdicts": [dataclasses.asdict(v) for v in self.verdicts],
            "from_cache": self.from_cache,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "sources": [dict(vars(s)) for s in sources],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that :meth:`to_dict` was called on.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: this is no report.
        """
        sources = decoded(list[Source], data["sources"])

        def node(item: dict[str, Any]) -> GraphNode:  # thousands of them: not by `decoded`
            name, target, spec, inputs = item["name"], item["target"], item["spec"], item["inputs"]
            if type(inputs) is not list or not all(type(text) is str for text in (name, target, spec, *inputs)):
                raise TypeError(f"a node of {name}, {target}, {spec}, {inputs}")
            return GraphNode(name, target, tuple(inputs), spec, sources[item["source"]])

        def graph(item: dict[str, Any]) -> GraphCode:
            nodes = {k: tuple(map(node, item[k])) for k in ("nodes_before", "nodes_after")}
            return dataclasses.replace(decoded(GraphCode, {k: v for k, v in item.items() if k not in nodes}), **nodes)

        return cls(
            decoded(list[Substitution], data["substitutions"]),
            decoded(list[Rejection], data["rejections"]),
            [graph(c) for c in data["graphs"]],
            decoded(list[Verdict], data["verdicts"]),
            decoded(bool, data["from_cache"]),
            decoded(list[str], data["notes"]),
            decoded(float, data["seconds"]),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report: ``.html``, a page of its own with the graphs drawn before and after; ``.json``, :meth:`to_dict`.

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

            text = page(self)
        path.write_text(text, encoding="utf-8")
        return path

    def __str__(self) -> str:
        return report_text(self)
