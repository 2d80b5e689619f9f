"""What happened to one graph: substitutions, rejections, verdicts, and its code before and after. All of it is immutable.

A pass returns a :class:`GraphOutcome`; reports are made of them.
"""

from __future__ import annotations

import dataclasses
import linecache
import os


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's program. ``str`` gives ``file:line in function: code``.

    Attributes:
        elsewhere: the line is of another program, from which compiled code and report were taken: its graph is the same.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""
    elsewhere: bool = False

    def __str__(self) -> str:
        if not self.file:
            return "(no source line)"
        changed = "" if linecache.getline(self.file, self.line).strip() in ("", self.code) else " (file changed since)"
        return f"{self.short}{changed} in {self.function}: {self.code}"

    @property
    def short(self) -> str:
        """``model.py:12``"""
        whose = " (another program's)" if self.elsewhere else ""
        return f"{os.path.basename(self.file)}:{self.line}{whose}" if self.file else "?"


@dataclasses.dataclass(frozen=True)
class Substitution:
    """One region that was replaced.

    Attributes:
        pattern: the pattern's name.
        graph: ``"forward"``, ``"backward"`` or ``"joint"``, numbered where one compile has several.
        source: the user's line that the first replaced output comes from.
        replaced: the operators that were removed.
        replacement: the operators that were inserted.
        inputs, outputs: shapes and dtypes, e.g. ``bf16[24300, 11520]``.
        node: the name of the first replaced output in the graph's ``before`` code.
        note: what the pattern says about the match, e.g. what was absorbed.
        replaced_nodes, new_nodes: the names of all removed nodes, in the ``before`` code, and of all inserted ones, in ``after``.
        module: the path of the module that the first replaced output comes from, e.g. ``layers.3.mixer.conv1d``; empty for the compiled
            function itself.
        replaced_operators, new_operators: how many operators were removed and inserted, views aside.
        replaced_bytes, new_bytes: what these read and write.
        inductor_us, estimated_us: how many microseconds the original and the replacement take by the estimate; None where it did not say.
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
    module: str = ""
    replaced_operators: int = 0
    new_operators: int = 0
    replaced_bytes: int = 0
    new_bytes: int = 0
    inductor_us: float | None = None
    estimated_us: float | None = None

    @property
    def estimated_gain(self) -> float | None:
        """Inductor's time over that of the replacement, by the estimate."""
        return self.inductor_us / self.estimated_us if self.inductor_us is not None and self.estimated_us else None


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A near miss: the pattern's anchor was there, and the site was left to Inductor.

    Attributes:
        reason: one sentence for the user.
        node: the name of the node that decided, in the graph's ``before`` code.
        code: the kind of reason, as in :class:`fusebackend.rewriting.pattern.Reject`; empty in reports kept by older versions.
        module: the path of the module that the node comes from.
    """

    pattern: str
    graph: str
    source: Source
    reason: str
    node: str
    code: str = ""
    module: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the gate found about one match, about a whole graph (``pattern`` is empty), or about the order in which a graph's convolutions
    run (``"channels_last"``: their times alone).

    Attributes:
        applied: whether the substitution was made.
        replaced_ms, inductor_ms: median times with the replacement and without; None where nothing was timed.
        why: where the times come from (``"measured"``, ``"cached"``), or why there are none.
        module: the path of the module that the match comes from.
        node: the name of the first output that is replaced, or would have been, in the graph's ``before`` code.
    """

    pattern: str
    graph: str
    source: Source
    applied: bool
    replaced_ms: float | None
    inductor_ms: float | None
    why: str
    module: str = ""
    node: str = ""

    @property
    def gain(self) -> float | None:
        """Inductor's time over that with the replacement; None where nothing was timed."""
        if self.replaced_ms is None or self.inductor_ms is None or self.replaced_ms <= 0:
            return None
        return self.inductor_ms / self.replaced_ms

    def __str__(self) -> str:
        what = "kept" if self.applied else "gated out" if self.replaced_ms is not None else "left to Inductor"
        if self.replaced_ms is None or self.inductor_ms is None:
            return f"{what}; {self.why}"
        return f"{what}: {both_times(self.replaced_ms, self.inductor_ms)} ({self.why})"


def both_times(replaced_ms: float, inductor_ms: float) -> str:
    """``1.23 ms replaced against 0.98 ms by Inductor``"""
    ours, theirs = (f"{t:.0f}" if t >= 100 else f"{t:.3g}" for t in (replaced_ms, inductor_ms))
    return f"{ours} ms replaced against {theirs} ms by Inductor"


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """One node of a graph, as it is drawn: its operator, the names of the nodes it reads, shape and dtype; ``label`` is what an input is
    called in the user's program (``layers.3.weight``)."""

    name: str
    target: str
    inputs: tuple[str, ...] = ()
    spec: str = ""
    source: Source = Source()
    label: str = ""


@dataclasses.dataclass(frozen=True)
class GraphCode:
    """One graph as readable code and as nodes in topological order.

    ``after`` equals ``before`` where nothing was rewritten. Both are empty where there was no near miss either: so it is in most graphs
    of most compiles, and writing them down takes milliseconds.

    ``operators`` counts the nodes before rewriting that compute something, and ``moved_bytes`` what these read and write.
    """

    name: str
    before: str
    after: str
    nodes: int
    nodes_before: tuple[GraphNode, ...] = ()
    nodes_after: tuple[GraphNode, ...] = ()
    operators: int = 0
    moved_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph before its function returned, and the line at which it did."""

    reason: str
    source: Source


@dataclasses.dataclass(frozen=True)
class GraphOutcome:
    """What one pass did to one graph, and what was decided about the graph as a whole.

    Attributes:
        graph: the graph's name within its compile.
        code: the graph before and after; None where it is not shown.
        seconds: how long matching, rewriting and timing took, over all the times that this graph was compiled.
    """

    graph: str
    substitutions: tuple[Substitution, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    code: GraphCode | None = None
    seconds: float = 0.0
