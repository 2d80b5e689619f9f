"""The Markdown tables of a run: what ``bench table`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusebackend.bench.environment import describe
from fusebackend.bench.rows import Row, by_family, complete, goals, ratios, substitutions
from fusebackend.bench.stats import geometric_mean

#: How columns are headed, where a way's name is not its heading.
_HEADINGS = {
    "inductor": "Inductor",
    "inductor dynamic": "dynamic",
    "inductor autotuned": "max-autotune",
}


def markdown(run: dict[str, Any]) -> str:
    """All tables of a run, below a line that says what it was made on."""
    parts = [f"{describe(run['environment'])}. Medians, peers in the same run; kernels on a GPU with its L2 cache flushed."]
    for section, make in (("kernels", _kernels), ("random", _random), ("models", _models), ("compile", _compile), ("losses", _losses)):
        rows = [row for row in run.get(section, []) if complete(row)]
        if rows:
            parts.append(make(rows))
    return "\n\n".join(parts)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _kernels(rows: list[Row]) -> str:
    parts = []
    for family, members in by_family(rows).items():
        columns = list(dict.fromkeys(c for row in members for c in row["ms"] if c != "floor"))
        columns += ["floor"] if any("floor" in row["ms"] for row in members) else []
        columns.sort(key=lambda c: c.startswith("fuse"))  # fuse last
        head = [f"`{family}`, ms", *(_HEADINGS.get(c, c) for c in columns), "over Inductor", "reached (goal)"]
        table = []
        for row in members:
            times = [_ms(row["ms"].get(c)) for c in columns]
            reached = "; ".join(_goal(*g) for g in goals(row))
            over = " / ".join(f"**{r:.2f}×**" for r in ratios("kernels", row).values())
            table.append([row["case"], *times, over, reached])
        parts.append(_table(head, table))
    return "\n\n".join(parts)


def _goal(column: str, reached: float, goal: float) -> str:
    unit = " ms" if column == "ms" else f" × {_HEADINGS.get(column, column)}"
    digits = 3 if column != "ms" or goal >= 0.1 else 4
    return f"{reached:.{digits}f}{unit} (≤ {goal:.{digits}g})" + ("" if reached <= goal else " missed")


def _ms(time: float | None) -> str:
    return "" if time is None else f"{time:.4g}" if time < 1 else f"{time:.3f}" if time < 10 else f"{time:.1f}"


def _random(rows: list[Row]) -> str:
    table = []
    for family, members in by_family(rows).items():
        found = sorted(r for row in members for r in ratios("random", row).values())
        slower = sum(r < 0.98 for r in found)
        if found:
            least, median, most = (f"{found[i]:.2f}×" for i in (0, len(found) // 2, -1))
            table.append([f"`{family}`", str(len(found)), least, median, most, str(slower)])
    return _table(["random shapes, over Inductor", "shapes", "least", "median", "most", "below 0.98"], table)


def _models(rows: list[Row]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    models = dict.fromkeys(row["model"] for row in rows)
    cells = {(row["model"], row["kind"]): row for row in rows}
    table = []
    for model in models:
        found = [cells.get((model, kind)) for kind in kinds]
        steps = [_model_step(row) if row else "" for row in found]
        counts = " / ".join(substitutions(row) if row else "–" for row in found)
        table.append([model, *steps, counts])
    means = [f"**{geometric_mean(row['ratio'] for row in rows if row['kind'] == kind):.2f}×**" for kind in kinds]
    table.append(["geometric mean", *means, ""])
    return _table(["model, Inductor → fuse", *(k.replace("-", " ") for k in kinds), "substitutions"], table)


def _model_step(row: Row) -> str:
    """Both times and their ratio, with the goal where it is the model's or was missed."""
    ratio, goal = row["ratio"], row["goal"]
    shown = f" (≥ {goal:g} missed)" if ratio < goal else f" (≥ {goal:g})" if goal > 1 else ""
    return f"{_ms(row['ms']['inductor'])} → {_ms(row['ms']['fuse'])} ms, **{ratio:.2f}×**{shown}"


def _compile(rows: list[Row]) -> str:
    table = []
    for row in rows:
        times = [f"{row['s'][way]:.2f} s" for way in ("inductor", "fuse")]
        table.append([row["graph"], row["cache"], *times, f"{row['ratio']:.2f}×", f"{100 * row['ours']:.2f} %"])
    return _table(["compile", "caches", "Inductor", "fuse", "fuse / Inductor", "in this package"], table)


def _losses(rows: list[Row]) -> str:
    table = []
    for row in rows:
        interval = f"**{row['ratio']:.2f}** ({row['low']:.2f}–{row['high']:.2f})"
        table.append([row["model"], substitutions(row), f"{row['seeds']} × {row['steps']}", interval, f"{row['gradient']:.2f}"])
    head = ["distance to float64, with over without", "substitutions", "seeds × steps", "losses (95 %)", "first gradient"]
    return _table(head, table)
