"""A report as text: what ``print(report)`` shows."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusebackend.report.module_paths import condensed
from fusebackend.rewriting.outcome import Substitution, Verdict

if TYPE_CHECKING:
    from fusebackend.report.model import Report


_MOST_SPECS = 8


def report_text(report: Report) -> str:
    """Context, coverage, substitutions, near misses, verdicts and graph breaks, each as a table; equal rows once with their count."""
    lines = [f"fusebackend: {_plural(len(report.substitutions), 'substitution')} in {_plural(len(report.graphs), 'graph')}"]
    if report.from_cache:
        lines[0] += " (compiled code from the cache)"
    covered = report.coverage()
    if covered is not None and report.substitutions:
        lines[0] += f": {covered}"
    lines += [f"  {line}" for line in context_lines(report.context)]
    lines += [f"  note: {n}" for n in report.notes]
    lines += [f"  {estimated}" for estimated in filter(None, [estimated_times(report)])]
    gains = Gains(report)
    substituted = [(s.pattern, s.graph, s.module, s.source.short, gains.of(s), _specs(s), _by(s)) for s in report.substitutions]
    lines += _table(("pattern", "graph", "module", "source", "gain", "shapes", "by"), substituted)
    if report.rejections:
        lines.append(f"left to Inductor: {_plural(len(report.rejections), 'near miss', 'near misses')}")
        missed = [(r.pattern, r.graph, r.module, r.source.short, r.reason) for r in report.rejections]
        lines += _table(("pattern", "graph", "module", "source", "reason"), missed)
    if report.verdicts:
        lines.append("timed by the gate:" if any(v.replaced_ms is not None for v in report.verdicts) else "gate:")
        verdicts = [(v.pattern or "(all)", v.graph, v.module, v.source.short, gain_text(v), str(v)) for v in report.verdicts]
        lines += _table(("pattern", "graph", "module", "source", "gain", "verdict"), verdicts)
    if report.breaks:
        lines.append(f"graph breaks: {len(report.breaks)}")
        lines += _table(("source", "reason"), [(b.source.short, b.reason) for b in report.breaks])
    return "\n".join(lines)


def context_lines(context: Mapping[str, str]) -> list[str]:
    """Versions and date, devices, options: a line each; none where the report does not say."""
    if not context:
        return []
    versions = ", ".join(f"{name} {context[name]}" for name in ("fusebackend", "torch", "python") if name in context)
    return [f"{context.get('date', '?')}, {versions}", f"on {context.get('device', '?')}; options: {context.get('options', '?')}"]


class Gains:
    """Inductor's time over that of each substitution of a report: ``1.83x`` as it was measured, ``~1.83x`` by the estimate."""

    def __init__(self, report: Report):
        # A line may have several sites, some of which were left to Inductor. Older reports do not name the node.
        self._timed = {(v.pattern, v.graph, v.source, v.module, v.node): gain_text(v) for v in report.verdicts if v.applied}

    def of(self, s: Substitution) -> str:
        estimated = "" if s.estimated_gain is None else f"~{s.estimated_gain:.2f}x"
        timed = (self._timed.get((s.pattern, s.graph, s.source, s.module, node)) for node in (s.node, ""))
        return next(filter(None, timed), estimated)


def gain_text(verdict: Verdict) -> str:
    """Inductor's time over ours, as it was measured: ``1.83x``."""
    return "" if verdict.gain is None else f"{verdict.gain:.2f}x"


def estimated_times(report: Report) -> str:
    """What the substitutions save by their estimates, in a sentence; empty where none was estimated."""
    both = [(s.inductor_us, s.estimated_us) for s in report.substitutions if s.inductor_us is not None and s.estimated_us is not None]
    if not both:
        return ""
    before, after = (sum(times) / 1e3 for times in zip(*both))
    whose = "all" if len(both) == len(report.substitutions) else f"{len(both)} of them"
    return f"by the estimates {whose} take {after:.3g} ms, {before:.3g} ms without"


def _by(s: Substitution) -> str:
    return s.note or " ".join(s.replacement)


def _plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _specs(s: Substitution) -> str:
    return f"{_listed(s.inputs)} -> {_listed(s.outputs)}"


def _listed(specs: Sequence[str]) -> str:
    """Of many tensors the first, and how many follow: one line of a table may stand for hundreds."""
    shown = specs if len(specs) <= _MOST_SPECS else [*specs[: _MOST_SPECS - 1], f"{len(specs) - _MOST_SPECS + 1} more"]
    return ", ".join(shown)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines. Rows that are equal but for their module are one, with their count; empty columns are left out."""
    if not rows:
        return []
    at = head.index("module") if "module" in head else None
    grouped: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for row in rows:
        grouped[row if at is None else (*row[:at], "", *row[at + 1 :])].append("" if at is None else row[at])
    made = []
    for row, modules in grouped.items():
        row = row if at is None else (*row[:at], condensed(modules), *row[at + 1 :])
        made.append((*row[:-1], f"{row[-1]}  (x{len(modules)})" if len(modules) > 1 else row[-1]))
    filled = [i for i in range(len(head)) if any(row[i] for row in made)]
    lines = [tuple(row[i] for i in filled) for row in (head, *made)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(filled) - 1)]
    return ["  " + "  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[-1]]).rstrip() for line in lines]
