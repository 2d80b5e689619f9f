"""The last lines of a run: geometric means, the smallest ratio, and how many goals were reached."""

from __future__ import annotations

import statistics

from fusebackend.bench.rows import FLOOR_GOAL, Row, by_family, complete, floor_over_fuse, goals, ratios
from fusebackend.bench.stats import geometric_mean


def summary(section: str, rows: list[Row]) -> str:
    """The summary of a section's rows; empty where there is nothing to add to them."""
    rows = [row for row in rows if complete(row)]
    lines = []
    if section in ("kernels", "random"):
        lines = _of_families(section, rows)
    if section == "models":
        lines = [_of_kind(kind, [row for row in rows if row["kind"] == kind]) for kind in dict.fromkeys(row["kind"] for row in rows)]
    return "\n" + "\n".join(lines) if lines else ""


def _of_families(section: str, rows: list[Row]) -> list[str]:
    lines = []
    for family, members in by_family(rows).items():
        found = [ratio for row in members for ratio in ratios(section, row).values()]
        if found:
            lines.append(f"{family}: geometric mean {geometric_mean(found):.2f}x Inductor, least {min(found):.2f}x")
        speeds = [speed for row in members if section == "random" and (speed := floor_over_fuse(row))]
        if speeds:
            mean, below = statistics.fmean(1 / speed for speed in speeds), sum(speed < FLOOR_GOAL for speed in speeds)
            lines.append(
                f"{family}: {mean:.3f} times the floor's time on average; {below} of {len(speeds)} below {FLOOR_GOAL:g} of its speed"
            )
    met = [reached <= goal for row in rows for _, reached, goal in goals(row)]
    return [*lines, f"{sum(met)} of {len(met)} goals reached"] if met else lines


def _of_kind(kind: str, rows: list[Row]) -> str:
    ratio = {row["model"]: row["ratio"] for row in rows}
    least = min(ratio, key=lambda model: ratio[model])
    missed = [row["model"] for row in rows if row["ratio"] < row["goal"]]
    ending = f"goals missed by {', '.join(missed)}" if missed else "all goals reached"
    return f"{kind}: geometric mean {geometric_mean(ratio.values()):.3f}x Inductor, least {ratio[least]:.3f}x ({least}); {ending}"
