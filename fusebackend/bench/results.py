"""The JSON of a run, its tables, and what changed since another run."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fusebackend.bench.device_time import geomean
from fusebackend.bench.pool import Row
from fusebackend.native.cache import write_atomically
from fusebackend.tools.object_reference import UsageError

#: The sections of a file, and what names a row in each.
SECTIONS: dict[str, tuple[str, ...]] = {
    "kernels": ("family", "case"),
    "random": ("family", "case"),
    "models": ("model", "kind"),
    "compile": ("graph", "cache"),
    "losses": ("model",),
}

#: Ratios that changed by no more than this are not listed by :func:`changes`.
NOTICED = 0.03

_COLUMNS = {
    "inductor": "Inductor",
    "inductor dynamic": "dynamic",
    "inductor autotuned": "max-autotune",
    "fuse": "ours",
    "fuse dynamic": "ours dynamic",
}


def write(path: Path, data: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(data, indent=1).encode())
    path.chmod(0o644)  # it is no secret


def read(path: Path) -> dict[str, Any]:
    """What :func:`write` wrote.

    Raises:
        UsageError: no such file, or it holds something else.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(data, dict) or "environment" not in data or not set(SECTIONS) & set(data):
        raise UsageError(f"{path}: no result of `python -m fusebackend bench`: it has no environment, or none of {', '.join(SECTIONS)}")
    return data


def merged(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several runs on the same device with the same versions as one.

    Raises:
        UsageError: they are of different devices, versions or commits.
    """
    whole: dict[str, Any] = {}
    for run in runs:
        for section, content in run.items():
            if section in SECTIONS:
                whole[section] = whole.get(section, []) + content
        environment = whole.setdefault("environment", run["environment"])
        for key in ("device", "torch", "commit"):
            if environment.get(key) != run["environment"].get(key):
                raise UsageError(f"these files are of more than one {key}: {environment.get(key)} and {run['environment'].get(key)}")
    return whole


def describe(environment: dict[str, Any]) -> str:
    return ", ".join([environment["device"], *(f"{k} {v}" for k, v in environment.items() if v and k not in ("library", "device"))])


def ratios(section: str, row: Row) -> dict[str, float]:
    """What a row is about: Inductor's time over ours; for compiles ours over Inductor's."""
    if section == "compile":
        return {"fuse / inductor": row["ratio"]}
    if section == "models":
        return {"inductor / fuse": row["ratio"]}
    if section == "losses":
        return {"with / without": row["ratio"]}
    pairs = (("inductor", "fuse"), ("inductor dynamic", "fuse dynamic"))
    return {f"{a} / {b}": row["ms"][a] / row["ms"][b] for a, b in pairs if a in row["ms"] and b in row["ms"]}


#: Of a copy's speed, which no random permutation shall miss.
FLOOR_GOAL = 0.8


def part_of_floor(row: Row) -> float:
    """The floor's time over our kernel's: by itself where it was timed so, else in what was compiled with ours; 0 if neither was timed."""
    ours = row["ms"].get("kernel", row["ms"].get("fuse"))
    return row["ms"]["floor"] / ours if ours and "floor" in row["ms"] else 0.0


def goals(row: Row) -> Iterator[tuple[str, float, float]]:
    """(column, what was reached, the goal) of each goal of a case; reached is the worst of ours, static and dynamic."""
    ours = [t for way, t in row["ms"].items() if way.startswith("fuse")]
    for column, goal in row.get("goals", {}).items():
        if ours and column == "ms":
            yield column, max(ours), goal
        elif ours and column in row["ms"]:
            yield column, max(ours) / row["ms"][column], goal


def complete(row: Row) -> bool:
    """Whether a row has figures, rather than the reason why there are none."""
    return "failure" not in row


def summary(section: str, rows: list[Row]) -> str:
    """Geometric means, the least ratio, and how many goals were reached, in lines."""
    rows = [r for r in rows if complete(r)]
    lines = []
    if section in ("kernels", "random"):
        for family, members in _by_family(rows).items():
            found = [r for row in members for r in ratios(section, row).values()]
            if found:
                lines.append(f"{family}: geometric mean {geomean(found):.2f}x Inductor, least {min(found):.2f}x")
            parts = [part for row in members if section == "random" and (part := part_of_floor(row))]
            if parts:
                mean, below = sum(1 / part for part in parts) / len(parts), sum(part < FLOOR_GOAL for part in parts)
                lines.append(
                    f"{family}: {mean:.3f} times the floor's time on average; {below} of {len(parts)} below {FLOOR_GOAL:g} of its speed"
                )
        met = [reached <= goal for row in rows for _, reached, goal in goals(row)]
        if met:
            lines.append(f"{sum(met)} of {len(met)} goals reached")
    if section == "models":
        for kind in dict.fromkeys(row["kind"] for row in rows):
            by_model = {row["model"]: row["ratio"] for row in rows if row["kind"] == kind}
            least = min(by_model, key=lambda model: by_model[model])
            missed = [row["model"] for row in rows if row["kind"] == kind and row["ratio"] < row["goal"]]
            lines.append(f"{kind}: geometric mean {geomean(by_model.values()):.3f}x Inductor, least {by_model[least]:.3f}x ({least})")
            lines[-1] += f"; goals missed by {', '.join(missed)}" if missed else "; all goals reached"
    return "\n" + "\n".join(lines) if lines else ""


# ---- Markdown ----


def markdown(data: dict[str, Any]) -> str:
    """The tables of a run, as README has them."""
    parts = [f"{describe(data['environment'])}. Medians, peers in the same run; kernels on a GPU with its L2 cache flushed."]
    for section, make in (("kernels", _kernels), ("random", _random), ("models", _models), ("compile", _compile), ("losses", _losses)):
        rows = [r for r in data.get(section, []) if complete(r)]
        if rows:
            parts.append(make(rows))
    return "\n\n".join(parts)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_family(rows: list[Row]) -> dict[str, list[Row]]:
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row["family"]].append(row)
    return grouped


def _kernels(rows: list[Row]) -> str:
    parts = []
    for family, members in _by_family(rows).items():
        columns = list(dict.fromkeys(c for row in members for c in row["ms"] if c != "floor"))
        columns += ["floor"] if any("floor" in row["ms"] for row in members) else []
        columns.sort(key=lambda c: c.startswith("fuse"))  # ours last
        head = [f"`{family}`, ms", *(_COLUMNS.get(c, c) for c in columns), "over Inductor", "reached (goal)"]
        table = []
        for row in members:
            times = [_ms(row["ms"].get(c)) for c in columns]
            reached = "; ".join(_goal(*g) for g in goals(row))
            over = " / ".join(f"**{r:.2f}×**" for r in ratios("kernels", row).values())
            table.append([row["case"], *times, over, reached])
        parts.append(_table(head, table))
    return "\n\n".join(parts)


def _goal(column: str, reached: float, goal: float) -> str:
    unit = " ms" if column == "ms" else f" × {_COLUMNS.get(column, column)}"
    digits = 3 if column != "ms" or goal >= 0.1 else 4
    return f"{reached:.{digits}f}{unit} (≤ {goal:.{digits}g})" + ("" if reached <= goal else " missed")


def _ms(time: float | None) -> str:
    return "" if time is None else f"{time:.4g}" if time < 1 else f"{time:.3f}" if time < 10 else f"{time:.1f}"


def _random(rows: list[Row]) -> str:
    table = []
    for family, members in _by_family(rows).items():
        found = sorted(r for row in members for r in ratios("random", row).values())
        slower = sum(r < 0.98 for r in found)
        if found:
            table.append(
                [f"`{family}`", str(len(found)), f"{found[0]:.2f}×", f"{found[len(found) // 2]:.2f}×", f"{found[-1]:.2f}×", str(slower)]
            )
    return _table(["random shapes, over Inductor", "shapes", "least", "median", "most", "below 0.98"], table)


def _models(rows: list[Row]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    models = dict.fromkeys(row["model"] for row in rows)
    cells = {(row["model"], row["kind"]): row for row in rows}
    table = []
    for model in models:
        found = [cells.get((model, kind)) for kind in kinds]
        steps = [
            f"{_ms(r['ms']['inductor'])} → {_ms(r['ms']['fuse'])} ms, **{r['ratio']:.2f}×**{_model_goal(r)}" if r else "" for r in found
        ]
        counts = " / ".join(substitutions(r) if r else "–" for r in found)
        table.append([model, *steps, counts])
    means = [f"**{geomean(r['ratio'] for r in rows if r['kind'] == kind):.2f}×**" for kind in kinds]
    table.append(["geometric mean", *means, ""])
    return _table(["model, Inductor → ours", *(k.replace("-", " ") for k in kinds), "substitutions"], table)


def _model_goal(row: Row) -> str:
    """A model's own goal; that of all models goes without saying where it is reached."""
    if row["ratio"] >= row["goal"]:
        return "" if row["goal"] <= 1 else f" (≥ {row['goal']:g})"
    return f" (≥ {row['goal']:g} missed)"


def substitutions(row: Row) -> str:
    return ", ".join(f"{name} {n}" for name, n in row["substitutions"].items()) or "none"


def _compile(rows: list[Row]) -> str:
    table = []
    for row in rows:
        times = [f"{row['s'][way]:.2f} s" for way in ("inductor", "fuse")]
        table.append([row["graph"], row["cache"], *times, f"{row['ratio']:.2f}×", f"{100 * row['ours']:.2f} %"])
    return _table(["compile", "caches", "Inductor", "ours", "ours / Inductor", "in this package"], table)


def _losses(rows: list[Row]) -> str:
    table = []
    for row in rows:
        interval = f"**{row['ratio']:.2f}** ({row['low']:.2f}–{row['high']:.2f})"
        table.append([row["model"], substitutions(row), f"{row['seeds']} × {row['steps']}", interval, f"{row['gradient']:.2f}"])
    head = ["distance to float64, with over without", "substitutions", "seeds × steps", "losses (95 %)", "first gradient"]
    return _table(head, table)


# ---- comparison ----


def changes(new: dict[str, Any], old: dict[str, Any]) -> str:
    """The ratios that changed by more than ``NOTICED``, and the rows that only one of the runs has, in lines."""
    lines = []
    for key in ("device", "torch"):
        if new["environment"].get(key) != old["environment"].get(key):
            lines.append(f"not the same {key}: {old['environment'].get(key)} before, {new['environment'].get(key)} now")
    compared = 0
    for section, names in SECTIONS.items():
        rows, before = ({tuple(r[n] for n in names): r for r in data.get(section, []) if complete(r)} for data in (new, old))
        for name in [n for n in before if n not in rows and section in new]:
            lines.append(f"{' '.join(name)}: not measured now")
        for name, row in rows.items():
            if name not in before:
                if section in old:
                    lines.append(f"{' '.join(name)}: new")
                continue
            then = ratios(section, before[name])
            for what, ratio in ratios(section, row).items():
                compared += what in then
                if what in then and abs(ratio / then[what] - 1) > NOTICED:
                    lines.append(f"{' '.join(name)}: {what} {then[what]:.3f} -> {ratio:.3f} ({100 * (ratio / then[what] - 1):+.1f} %)")
    lines.append(f"{compared} ratios compared; those that changed by more than {100 * NOTICED:.0f} % are listed")
    return "\n".join(lines)
