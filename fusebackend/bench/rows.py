"""A row of a run: the figures of one measurement, as they are printed, written, tabulated and compared."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

#: What a measurement found, ready for JSON. Its keys depend on the section, and are listed where it is measured.
Row = dict[str, Any]

#: The sections of a run, and the keys that identify a row of each.
SECTIONS: dict[str, tuple[str, ...]] = {
    "kernels": ("family", "case"),
    "random": ("family", "case"),
    "models": ("model", "kind"),
    "compile": ("graph", "cache"),
    "losses": ("model",),
}

#: No random permutation should run at less than this part of a copy's speed.
FLOOR_GOAL = 0.8


def identity(section: str, row: Row) -> tuple[str, ...]:
    """What tells a row from the others of its section."""
    return tuple(row[key] for key in SECTIONS[section])


def complete(row: Row) -> bool:
    """Whether a row has figures; without them it has ``failure``, the reason."""
    return "failure" not in row


def ratios(section: str, row: Row) -> dict[str, float]:
    """The ratios that a row is about: Inductor's time over fuse's; for compiles fuse over Inductor; for losses with over without."""
    if section == "compile":
        return {"fuse / inductor": row["ratio"]}
    if section == "models":
        return {"inductor / fuse": row["ratio"]}
    if section == "losses":
        return {"with / without": row["ratio"]}
    pairs = (("inductor", "fuse"), ("inductor dynamic", "fuse dynamic"))
    return {f"{a} / {b}": row["ms"][a] / row["ms"][b] for a, b in pairs if a in row["ms"] and b in row["ms"]}


def floor_over_fuse(row: Row) -> float:
    """The floor's time over fuse's (the kernel's alone if that was timed, else the compiled function's); 0 if either is missing."""
    fuse = row["ms"].get("kernel", row["ms"].get("fuse"))
    return row["ms"]["floor"] / fuse if fuse and "floor" in row["ms"] else 0.0


def goals(row: Row) -> Iterator[tuple[str, float, float]]:
    """(column, reached, goal) of each goal of a case. What was reached is the worst of fuse's ways, static and dynamic."""
    fuse = [ms for way, ms in row["ms"].items() if way.startswith("fuse")]
    for column, goal in row.get("goals", {}).items():
        if fuse and column == "ms":
            yield column, max(fuse), goal
        elif fuse and column in row["ms"]:
            yield column, max(fuse) / row["ms"][column], goal


def substitutions(row: Row) -> str:
    """The substitutions of a model by pattern, in words."""
    return ", ".join(f"{name} {count}" for name, count in row["substitutions"].items()) or "none"


def by_family(rows: Iterable[Row]) -> dict[str, list[Row]]:
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row["family"]].append(row)
    return grouped
