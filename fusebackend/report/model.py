"""What was rewritten, what was not and why: the report of one compile.

Inductor's caches skip the passes on a hit, so a report is kept beside its cached code, under a key of its own, made
from what the backend was given; a warm process finds it there (:func:`load`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import linecache
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import trace_structured

from fusebackend import fx_utils as g
from fusebackend.log import log
from fusebackend.native import cache
from fusebackend.profitability import verdict_store as verdicts


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's program. ``str`` gives ``file:line in function: code``."""

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        if not self.file:
            return "(no source line)"
        moved = "" if linecache.getline(self.file, self.line).strip() in ("", self.code) else " (file changed since)"
        return f"{self.short}{moved} in {self.function}: {self.code}"

    @property
    def short(self) -> str:
        """``model.py:12``"""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "?"


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s+(?P<code>[^\n]*))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def source_of(node: fx.Node) -> Source:
    """The innermost line outside torch of the stack that made ``node``."""
    frames = [m.groupdict() for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    outside = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not outside:
        return Source()
    frame = outside[-1]
    return Source(frame["file"], int(frame["line"]), frame["function"], (frame["code"] or "").strip())


@dataclasses.dataclass(frozen=True)
class Substitution:
    """One rewritten region.

    Attributes:
        pattern: the pattern's name.
        graph: ``"forward"``, ``"backward"`` or ``"joint"``, with the compile's number where there are several.
        source: the user's line that the replaced node comes from.
        replaced: the operators that went.
        replacement: the operators that came.
        inputs, outputs: shapes and dtypes, e.g. ``bf16[24300, 11520]``.
        node: the name of the replaced node in the graph's ``before`` code.
        note: what the pattern had to say, e.g. what was absorbed.
        replaced_nodes, new_nodes: the names of all that went, in the ``before`` code, and of all that came, in ``after``.
    """

    pattern: str
    graph: str
    source: Source
    replaced: tuple[str, ...]
    replacement: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    node: str
    note: str = ""
    replaced_nodes: tuple[str, ...] = ()
    new_nodes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A near miss: the pattern's anchor was there, and the guard named in ``reason`` failed at ``node``."""

    pattern: str
    graph: str
    source: Source
    reason: str
    node: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the gate found about one match, or about a whole graph (``pattern`` is empty).

    Attributes:
        applied: whether the substitution was made.
        replaced_ms, inductor_ms: median times with the replacement and without; None where nothing was timed.
        why: where the times come from (``"measured"``, ``"cached"``), or why there are none.
    """

    pattern: str
    graph: str
    source: Source
    applied: bool
    replaced_ms: float | None
    inductor_ms: float | None
    why: str

    @classmethod
    def of(cls, pattern: str, graph: str, source: Source, verdict: verdicts.Verdict | None, applied: bool, why: str) -> Verdict:
        replaced_ms, inductor_ms = (None, None) if verdict is None else (verdict.replaced_ms, verdict.inductor_ms)
        return cls(pattern, graph, source, applied, replaced_ms, inductor_ms, why)

    def __str__(self) -> str:
        what = "kept" if self.applied else "gated out" if self.replaced_ms is not None else "left to Inductor"
        if self.replaced_ms is None or self.inductor_ms is None:
            return f"{what}; {self.why}"
        return f"{what}: {verdicts.times(self.replaced_ms, self.inductor_ms)} ({self.why})"


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """One node of a graph, as the page draws it: its operator, the names of the nodes it reads, shape and dtype."""

    name: str
    target: str
    inputs: tuple[str, ...] = ()
    spec: str = ""
    source: Source = Source()


@dataclasses.dataclass(frozen=True)
class GraphCode:
    """One graph as readable code and as nodes in topological order.

    ``after`` equals ``before`` where nothing was rewritten. Both are empty where there was no near miss either: most
    graphs of most compiles, which shall not pay for it.
    """

    name: str
    before: str
    after: str
    nodes: int
    nodes_before: tuple[GraphNode, ...] = ()
    nodes_after: tuple[GraphNode, ...] = ()


@dataclasses.dataclass
class Report:
    """The report of one compile, or of all the compiles of one :func:`fusebackend.explain`.

    Attributes:
        substitutions, rejections, graphs, verdicts: see their classes.
        from_cache: the compiled code came from Inductor's cache, and this report from the compile that filled it.
        notes: what concerns the whole compile, e.g. that there is no native library.
        seconds: the time that this backend added to the compile (Inductor's own is not in it).
    """

    substitutions: list[Substitution] = dataclasses.field(default_factory=list)
    rejections: list[Rejection] = dataclasses.field(default_factory=list)
    graphs: list[GraphCode] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    from_cache: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def drop_graph(self, name: str) -> None:
        """Forgets what was recorded of a graph, before it is recorded anew."""
        self.substitutions = [s for s in self.substitutions if s.graph != name]
        self.rejections = [r for r in self.rejections if r.graph != name]
        self.graphs = [c for c in self.graphs if c.name != name]
        self.verdicts = [v for v in self.verdicts if v.graph != name]

    def extend(self, other: Report) -> None:
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
        def revive(kind: type, item: dict[str, Any]) -> Any:
            item = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
            return kind(**{**item, "source": Source(**item["source"])})

        sources = [Source(**s) for s in data["sources"]]

        def nodes(items: list[dict[str, Any]]) -> tuple[GraphNode, ...]:
            return tuple(GraphNode(**{**n, "inputs": tuple(n["inputs"]), "source": sources[n["source"]]}) for n in items)

        def graph(item: dict[str, Any]) -> GraphCode:
            drawn = {k: nodes(item[k]) for k in ("nodes_before", "nodes_after")}
            return GraphCode(**{**item, **drawn})

        return cls(
            [revive(Substitution, s) for s in data["substitutions"]],
            [revive(Rejection, r) for r in data["rejections"]],
            [graph(c) for c in data["graphs"]],
            [revive(Verdict, v) for v in data["verdicts"]],
            data["from_cache"],
            data["notes"],
            data["seconds"],
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
        lines = [f"fusebackend: {_plural(len(self.substitutions), 'substitution')} in {_plural(len(self.graphs), 'graph')}"]
        if self.from_cache:
            lines[0] += " (compiled code and report from the cache)"
        lines += [f"  note: {n}" for n in self.notes]
        rows = [(s.pattern, s.graph, s.source.short, _specs(s), s.note or " ".join(s.replacement)) for s in self.substitutions]
        lines += _table(("pattern", "graph", "source", "shapes", "by"), rows)
        if self.rejections:
            lines.append(f"left to Inductor: {_plural(len(self.rejections), 'near miss', 'near misses')}")
            lines += _table(
                ("pattern", "graph", "source", "reason"), [(r.pattern, r.graph, r.source.short, r.reason) for r in self.rejections]
            )
        if self.verdicts:
            lines.append("timed by the gate:" if any(v.replaced_ms is not None for v in self.verdicts) else "gate:")
            lines += _table(
                ("pattern", "graph", "source", "verdict"),
                [(v.pattern or "(all)", v.graph, v.source.short, str(v)) for v in self.verdicts],
            )
        return "\n".join(lines)


#: What :meth:`Report.save` writes.
SUFFIXES = (".html", ".json")


def _plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _specs(s: Substitution) -> str:
    return f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines; equal rows are given once with their count."""
    if not rows:
        return []
    counted = collections.Counter(rows)
    rows = [(*row[:-1], f"{row[-1]}  (x{n})" if n > 1 else row[-1]) for row, n in counted.items()]
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head) - 1)]
    return ["  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]).rstrip() for row in (head, *rows)]


def describe_substitution(
    pattern: str, graph_name: str, nodes: Iterable[fx.Node], outputs: Sequence[fx.Node], new_nodes: Sequence[fx.Node], note: str
) -> Substitution:
    """Records a replacement just before the old nodes go."""
    inside = set(nodes)
    inputs, results = _operands(outputs, new_nodes)
    return Substitution(
        pattern=pattern,
        graph=graph_name,
        source=source_of(outputs[0]),
        replaced=tuple(g.describe(n) for n in sorted(inside)),
        replacement=tuple(g.describe(n) for n in new_nodes if not g.is_view(n)),
        inputs=inputs,
        outputs=results,
        node=outputs[0].name,
        note=note,
        replaced_nodes=tuple(n.name for n in sorted(inside)),
        new_nodes=tuple(n.name for n in new_nodes),
    )


def _operands(outputs: Sequence[fx.Node], new_nodes: Sequence[fx.Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inputs = dict.fromkeys(i for n in new_nodes for i in n.all_input_nodes if i not in new_nodes)
    return tuple(g.spec(g.value(n)) for n in inputs if g.is_tensor(n)), tuple(g.spec(g.value(n)) for n in outputs)


def shapes(outputs: Sequence[fx.Node], new_nodes: Sequence[fx.Node]) -> str:
    """``f32[8, 4] -> f32[4, 8]``: what a replacement reads and gives."""
    inputs, results = _operands(outputs, new_nodes)
    return f"{', '.join(inputs)} -> {', '.join(results)}"


def graph_code(graph: fx.Graph) -> str:
    """The graph as code with shapes and strides."""
    assert graph.owning_module is not None
    return graph.owning_module.print_readable(print_output=False, include_stride=True, include_device=True)


def graph_nodes(graph: fx.Graph, known: tuple[GraphNode, ...] = ()) -> tuple[GraphNode, ...]:
    """The graph's nodes in order. ``known`` are those of the graph before it was rewritten, most of which still hold."""
    before = {n.name: n for n in known}
    sources: dict[str, Source] = {}  # many nodes come from one call, and their stacks take long to read
    found = []
    for node in graph.nodes:
        inputs = tuple([i.name for i in node.all_input_nodes])
        old = before.get(node.name)
        if old is not None and old.inputs == inputs:
            found.append(old)
            continue
        stack = node.meta.get("stack_trace") or ""
        if stack not in sources:
            sources[stack] = source_of(node)
        target = g.describe(node) if node.op == "call_function" else node.op
        shape = _shape(g.value(node)) if node.op != "output" else ""
        found.append(GraphNode(node.name, target, inputs, shape, sources[stack]))
    return tuple(found)


def _shape(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shape, value))
    return "" if value is None else g.spec(value)


def key(gm: fx.GraphModule, example_inputs: Any, salt: str) -> str:
    """Names the report of a compile by what the backend was given: graph, inputs, settings that change the result."""
    digest = hashlib.sha256(salt.encode())
    settings = (
        torch.__version__,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    digest.update(repr(settings).encode())
    # The placeholders' fake values have symbolic sizes where the compile is dynamic; the inputs themselves may not.
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    for fake, given in zip(values, example_inputs):
        i = given if fake is None else fake
        strides = tuple(i.stride()) if isinstance(i, torch.Tensor) else ""
        digest.update(f"{g.spec(i)}{strides}{getattr(i, 'requires_grad', None)}{getattr(i, 'device', None)}".encode())
    for module in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        digest.update(module.graph.python_code("self").src.encode())
    return digest.hexdigest()[:32]


def _path(name: str) -> Path:
    """In Inductor's own cache directory: a report lives and goes with the compiled code that it is about."""
    return Path(cache_dir()) / "fusebackend-reports" / f"{name}.json"


def decisions_path(name: str) -> Path:
    """Where the decisions of that compile are kept (:mod:`fusebackend.profitability.decision_record`)."""
    return _path(name).with_suffix(".gate.json")


def save(report: Report, name: str) -> None:
    """Keeps a report for later processes. A cache that can't be written costs only that."""
    try:
        _path(name).parent.mkdir(parents=True, exist_ok=True)
        cache.write_atomically(_path(name), json.dumps(report.to_dict()).encode())
    except OSError as error:
        log.debug("report not kept: %s", error)


def trace(report: Report) -> None:
    """Puts a report among the artifacts of the compile that is going on (``TORCH_TRACE=folder``), which tlparse shows."""
    payloads: dict[str, Callable[[], str]] = {"json": lambda: json.dumps(report.to_dict()), "string": lambda: str(report)}
    for encoding, payload in payloads.items():
        name = "fusebackend_report" + ("_text" if encoding == "string" else "")
        trace_structured("artifact", metadata_fn=functools.partial(dict, name=name, encoding=encoding), payload_fn=payload)


def load(name: str) -> Report | None:
    """The report of an earlier compile of the same, or None."""
    try:
        return dataclasses.replace(Report.from_dict(json.loads(_path(name).read_bytes())), from_cache=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("kept report not readable: %s", error)
        return None
