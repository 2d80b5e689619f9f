"""Plots of a run, with matplotlib (``pip install 'fusebackend[bench]'``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusebackend.bench.device_time import geomean
from fusebackend.bench.pool import Row
from fusebackend.bench.results import FLOOR_GOAL, complete, describe, part_of_floor, ratios

_OURS, _DYNAMIC, _EVEN = "#3b6ea8", "#9cc0e0", "#888888"


class MissingExtra(ImportError):
    """matplotlib is not there; the message says how to get it."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("no plots: matplotlib is missing; pip install 'fusebackend[bench]' brings it") from error
    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what a run has: ``families.png`` (speed-up of each case), ``models.png``, ``random.png`` (distribution).

    Raises:
        MissingExtra: matplotlib can't be imported.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section, name, make in (("kernels", "families", _families), ("models", "models", _models), ("random", "random", _random)):
        rows = [r for r in data.get(section, []) if complete(r) and (ratios(section, r) or section == "random" and part_of_floor(r))]
        if not rows:
            continue
        figure = make(pyplot, rows)
        figure.axes[0].set_title(describe(data["environment"]), fontsize=6, color="gray")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written


def _families(pyplot: Any, rows: list[Row]) -> Any:
    """Horizontal bars: Inductor's time over ours, static and dynamic, grouped by family."""
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(rows)))
    for place, row in enumerate(rows):
        for shift, (what, ratio) in zip((-0.2, 0.2), ratios("kernels", row).items()):
            axes.barh(place + shift, ratio - 1, 0.4, left=1, color=_DYNAMIC if "dynamic" in what else _OURS)
            axes.text(ratio, place + shift, f" {ratio:.2f}", va="center", ha="left" if ratio >= 1 else "right", fontsize=6)
    axes.set_yticks(range(len(rows)), [f"{row['family']}: {row['case']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    _speed_up(axes.xaxis, axes.axvline)
    axes.set_xlabel("Inductor's time over ours (dark: static, light: dynamic=True)")
    return figure


def _models(pyplot: Any, rows: list[Row]) -> Any:
    """Groups of bars: a model each, a bar a kind."""
    models, kinds = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "kind"))
    figure, axes = pyplot.subplots(figsize=(2 + 0.8 * len(models), 4))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        members = [row for row in rows if row["kind"] == kind]
        places = [models.index(row["model"]) + (i - (len(kinds) - 1) / 2) * width for row in members]
        found = [row["ratio"] for row in members]
        label = f"{kind.replace('-', ' ')} (geometric mean {geomean(found):.2f})"
        axes.bar(places, [r - 1 for r in found], width, bottom=1, label=label)
        for place, ratio in zip(places, found):
            axes.text(place, ratio, f"{ratio:.2f}", ha="center", va="bottom" if ratio >= 1 else "top", fontsize=6)
    axes.set_xticks(range(len(models)), models, rotation=30, ha="right", fontsize=8)
    axes.set_yscale("log")
    _speed_up(axes.yaxis, axes.axhline)
    axes.set_ylabel("Inductor's time over ours")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure


def _random(pyplot: Any, rows: list[Row]) -> Any:
    """For each family the part of random shapes (y) whose speed-up is x at most; beside it that whose part of the floor's speed is."""
    compared, floored = [row for row in rows if ratios("random", row)], [row for row in rows if part_of_floor(row)]
    shown = [part for part in (compared, floored) if part]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(1 + 5 * len(shown), 4), squeeze=False)
    if compared:
        axes = panels[0][0]
        _distribution(axes, compared, lambda row: list(ratios("random", row).values()))
        axes.set_xscale("log")
        _speed_up(axes.xaxis, axes.axvline)
        axes.set_xlabel("Inductor's time over ours, random shapes")
    if floored:
        axes = panels[0][-1]
        _distribution(axes, floored, lambda row: [part_of_floor(row)])
        axes.axvline(FLOOR_GOAL, color=_EVEN, linewidth=0.8)
        axes.set_xlabel(f"part of the floor's speed (of a copy, for permute; line: {FLOOR_GOAL:g})")
    return figure


def _distribution(axes: Any, rows: list[Row], values: Callable[[Row], list[float]]) -> None:
    for family in dict.fromkeys(row["family"] for row in rows):
        found = sorted(v for row in rows if row["family"] == family for v in values(row))
        axes.step(found, [(i + 1) / len(found) for i in range(len(found))], where="post", label=f"{family}, {len(found)} shapes")
    axes.set_ylabel("part of the shapes, at most")
    axes.legend(fontsize=7)


def _speed_up(axis: Any, line: Any) -> None:
    """A logarithmic axis with plain numbers, and a line where both are equally fast."""
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullFormatter

    line(1, color=_EVEN, linewidth=0.8)
    low, high = axis.get_view_interval()
    steps = (0.5, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 200)
    shown = [s for s in steps if low <= s <= high]
    axis.set_major_locator(FixedLocator(shown if len(shown) < 9 else [s for s in shown if s not in (0.9, 1.1, 1.2, 7)]))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())
    axis.grid(True, linewidth=0.3)
