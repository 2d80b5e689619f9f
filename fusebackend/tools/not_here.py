"""Why a pattern is not somewhere: notes for ``explain(..., pattern=)`` and ``explain(..., at=)``, also where nothing came near."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fusebackend.report.model import Report
from fusebackend.rewriting.inquiry import Nearest
from fusebackend.rewriting.outcome import Source
from fusebackend.rewriting.pattern import Pattern

_MOST = 3  # places that are named


def parse_line(at: str) -> tuple[str, int]:
    """``"models/llama.py:12"`` as file and line.

    Raises:
        ValueError: it is not of the form.
    """
    file, colon, line = at.rpartition(":") if isinstance(at, str) else ("", "", "")
    if not (colon and file and line.isdecimal() and int(line) > 0):
        raise ValueError(f"at={at!r}; a line of the program is accepted, e.g. 'model.py:12'")
    return file, int(line)


def notes_on_pattern(report: Report, pattern: Pattern, nearest: Sequence[Nearest]) -> list[str]:
    """Where the pattern was found, where it came nearest, or that none of its operators is there."""
    made = sum(s.pattern == pattern.name for s in report.substitutions)
    missed = sum(r.pattern == pattern.name for r in report.rejections)
    notes = [f"{pattern.name}: {made} substitutions, {missed} near misses (above)"] if made or missed else []
    if not nearest and not notes:
        anchors = ", ".join(map(str, pattern.anchors))
        return [f"{pattern.name}: no graph holds an operator at which it begins ({anchors})"]
    best = sorted(dict.fromkeys(nearest), key=lambda n: -n.part)[: 1 if notes else _MOST]
    for near in best:
        part = f"{near.part:.0%} of it" if near.reason else "its operator, and nothing that it looks for around it"
        why = f": {near.reason}; {near.found}" if near.reason else f" ({near.found})"
        notes.append(f"{pattern.name}: nearest at {near.source.short} in {near.graph}, {part}{why}")
    return notes


def notes_on_line(report: Report, line: tuple[str, int], patterns: Sequence[Pattern]) -> list[str]:
    """What each pattern said of the operators of one line."""
    where = f"{os.path.basename(line[0])}:{line[1]}"
    nodes = dict.fromkeys((n.target, n.spec) for graph in report.graphs for n in graph.nodes_before if _is_at(n.source, line))
    if not nodes:
        files = sorted({n.source.short for graph in report.graphs for n in graph.nodes_before if n.source.file})
        near = [f for f in files if f.partition(":")[0] == where.partition(":")[0]]
        return [f"at {where}: no operator comes from there; lines of the graphs: {', '.join(near or files[:8]) or 'none'}"]
    notes = [f"at {where}: {', '.join(f'{target} {spec}'.strip() for target, spec in nodes)}"]
    silent = []
    for pattern in patterns:
        made = [s for s in report.substitutions if s.pattern == pattern.name and _is_at(s.source, line)]
        missed = dict.fromkeys(r.reason for r in report.rejections if r.pattern == pattern.name and _is_at(r.source, line))
        if made:
            notes.append(f"at {where}: {pattern.name} replaced it by {' '.join(made[0].replacement)}")
        elif missed:
            notes.append(f"at {where}: {pattern.name}: {'; '.join(missed)}")
        elif {str(a) for a in pattern.anchors} & {target for target, _ in nodes}:
            notes.append(f"at {where}: {pattern.name} looked, and found nothing like it; explain(..., pattern={pattern.name!r}) says more")
        else:
            silent.append(pattern.name)
    if silent:
        notes.append(f"at {where}: begins at none of these operators: {', '.join(silent)}")
    return notes


def _is_at(source: Source, line: tuple[str, int]) -> bool:
    same_file = source.file == line[0] or source.file.endswith(os.sep + line[0].lstrip("./"))
    return bool(source.file) and same_file and source.line == line[1]
