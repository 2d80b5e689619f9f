"""Plots of a run, with matplotlib (``pip install 'fusebackend[bench]'``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusebackend.bench.environment import describe
from fusebackend.bench.extras import optional
from fusebackend.bench.rows import FLOOR_GOAL, Row, complete, floor_over_fuse, ratios
from fusebackend.bench.stats import geometric_mean

_STATIC_COLOR, _DYNAMIC_COLOR, _EVEN_COLOR = "#3b6ea8", "#9cc0e0", "#888888"


def _pyplot() -> Any:
    optional("matplotlib", "drawing plots").use("agg")
    return optional("matplotlib.pyplot", "drawing plots")


def draw(run: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the sections that a run has, and returns the files: ``families.png`` (the speed-up of each case), ``models.png`` and
    ``random.png`` (the distribution of speed-ups).

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section, name, make in (("kernels", "families", _families), ("models", "models", _models), ("random", "random", _random)):
        rows = [r for r in run.get(section, []) if complete(r) and (ratios(section, r) or section == "random" and floor_over_fuse(r))]
        if not rows:
            continue
        figure = make(pyplot, rows)
        figure.axes[0].set_title(describe(run["environment"]), fontsize=6, color="gray")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written


def _families(pyplot: Any, rows: list[Row]) -> Any:
    """Horizontal bars: Inductor's time over fuse's, static and dynamic, grouped by family."""
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(rows)))
    for position, row in enumerate(rows):
        for shift, (what, ratio) in zip((-0.2, 0.2), ratios("kernels", row).items()):
            axes.barh(position + shift, ratio - 1, 0.4, left=1, color=_DYNAMIC_COLOR if "dynamic" in what else _STATIC_COLOR)
            axes.text(ratio, position + shift, f" {ratio:.2f}", va="center", ha="left" if ratio >= 1 else "right", fontsize=6)
    axes.set_yticks(range(len(rows)), [f"{row['family']}: {row['case']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    _speed_up(axes.xaxis, axes.axvline)
    axes.set_xlabel("Inductor's time over fuse's (dark: static, light: dynamic=True)")
    return figure


def _models(pyplot: Any, rows: list[Row]) -> Any:
    """A group of bars for each model, with a bar for each kind."""
    models, kinds = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "kind"))
    figure, axes = pyplot.subplots(figsize=(2 + 0.8 * len(models), 4))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        members = [row for row in rows if row["kind"] == kind]
        positions = [models.index(row["model"]) + (i - (len(kinds) - 1) / 2) * width for row in members]
        found = [row["ratio"] for row in members]
        label = f"{kind.replace('-', ' ')} (geometric mean {geometric_mean(found):.2f})"
        axes.bar(positions, [r - 1 for r in found], width, bottom=1, label=label)
        for position, ratio in zip(positions, found):
            axes.text(position, ratio, f"{ratio:.2f}", ha="center", va="bottom" if ratio >= 1 else "top", fontsize=6)
    axes.set_xticks(range(len(models)), models, rotation=30, ha="right", fontsize=8)
    axes.set_yscale("log")
    _speed_up(axes.yaxis, axes.axhline)
    axes.set_ylabel("Inductor's time over fuse's")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure


def _random(pyplot: Any, rows: list[Row]) -> Any:
    """The cumulative distribution of the speed-ups of each family's random shapes and, beside it, of the part of the floor's speed."""
    compared, floored = [row for row in rows if ratios("random", row)], [row for row in rows if floor_over_fuse(row)]
    shown = [part for part in (compared, floored) if part]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(1 + 5 * len(shown), 4), squeeze=False)
    if compared:
        axes = panels[0][0]
        _distribution(axes, compared, lambda row: list(ratios("random", row).values()))
        axes.set_xscale("log")
        _speed_up(axes.xaxis, axes.axvline)
        axes.set_xlabel("Inductor's time over fuse's, random shapes")
    if floored:
        axes = panels[0][-1]
        _distribution(axes, floored, lambda row: [floor_over_fuse(row)])
        axes.axvline(FLOOR_GOAL, color=_EVEN_COLOR, linewidth=0.8)
        axes.set_xlabel(f"part of the floor's speed (of a copy, for permute; line: {FLOOR_GOAL:g})")
    return figure


def _distribution(axes: Any, rows: list[Row], values: Callable[[Row], list[float]]) -> None:
    for family in dict.fromkeys(row["family"] for row in rows):
        found = sorted(v for row in rows if row["family"] == family for v in values(row))
        axes.step(found, [(i + 1) / len(found) for i in range(len(found))], where="post", label=f"{family}, {len(found)} shapes")
    axes.set_ylabel("part of the shapes, at most")
    axes.legend(fontsize=7)


def _speed_up(axis: Any, line: Any) -> None:
    """Formats a logarithmic axis with plain numbers, and draws a line where both are equally fast."""
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullFormatter

    line(1, color=_EVEN_COLOR, linewidth=0.8)
    low, high = axis.get_view_interval()
    steps = (0.5, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 200)
    shown = [s for s in steps if low <= s <= high]
    axis.set_major_locator(FixedLocator(shown if len(shown) < 9 else [s for s in shown if s not in (0.9, 1.1, 1.2, 7)]))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())
    axis.grid(True, linewidth=0.3)
