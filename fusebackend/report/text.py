"""A report as text: what ``print(report)`` shows."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusebackend.rewriting.outcome import Substitution

if TYPE_CHECKING:
    from fusebackend.report.model import Report


def report_text(report: Report) -> str:
    """Substitutions, near misses and verdicts, each as a table; equal rows once with their count."""
    lines = [f"fusebackend: {_plural(len(report.substitutions), 'substitution')} in {_plural(len(report.graphs), 'graph')}"]
    if report.from_cache:
        lines[0] += " (compiled code and report from the cache)"
    lines += [f"  note: {n}" for n in report.notes]
    substituted = [(s.pattern, s.graph, s.source.short, _specs(s), s.note or " ".join(s.replacement)) for s in report.substitutions]
    lines += _table(("pattern", "graph", "source", "shapes", "by"), substituted)
    if report.rejections:
        lines.append(f"left to Inductor: {_plural(len(report.rejections), 'near miss', 'near misses')}")
        missed = [(r.pattern, r.graph, r.source.short, r.reason) for r in report.rejections]
        lines += _table(("pattern", "graph", "source", "reason"), missed)
    if report.verdicts:
        lines.append("timed by the gate:" if any(v.replaced_ms is not None for v in report.verdicts) else "gate:")
        timed = [(v.pattern or "(all)", v.graph, v.source.short, str(v)) for v in report.verdicts]
        lines += _table(("pattern", "graph", "source", "verdict"), timed)
    return "\n".join(lines)


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
