"""What every measuring command does with its rows: prints them as they come, writes, summarises, compares and draws them."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fusebackend.bench import plots, result_file
from fusebackend.bench.comparison import changes
from fusebackend.bench.environment import describe, environment
from fusebackend.bench.extras import MissingExtra
from fusebackend.bench.rows import Row, complete, identity
from fusebackend.bench.summary import summary
from fusebackend.tools.command_line import check_file_to_write, check_folder_to_write


def measure(chosen: argparse.Namespace, section: str, rows: Iterable[tuple[int, Row]], heading: str, line: Callable[[Row], str]) -> int:
    """Runs a measuring command.

    Args:
        chosen: ``output``, ``plots`` and ``compare`` of the command line.
        rows: measures as it is iterated: positions and rows, in any order. They are written in the order of their positions.
        heading, line: what is printed above the rows, and for each.

    Returns:
        1 if a row has no figures, or wrong results; else 0.

    Raises:
        UsageError: what was given to ``--compare`` is no run, or a folder does not exist.
    """
    old = result_file.read(chosen.compare) if chosen.compare else None
    if chosen.output:
        check_file_to_write(chosen.output, "--output")
    if chosen.plots:
        check_folder_to_write(chosen.plots, "--plots")
    run: dict[str, Any] = {"environment": environment(), section: []}
    print(describe(run["environment"]), heading, sep="\n\n", flush=True)
    began, by_position = time.perf_counter(), {}
    for position, row in _sigterm_raises(rows):
        by_position[position] = row
        run[section] = [by_position[i] for i in sorted(by_position)]
        run["seconds"] = round(time.perf_counter() - began)
        print(line(row) if complete(row) else f"{' '.join(identity(section, row)):44}no figures: {row['failure']}", flush=True)
        if chosen.output:
            result_file.write(chosen.output, run)
    print(summary(section, run[section]))
    if old:
        print(changes(run, old))
    if chosen.plots:
        draw_plots(run, chosen.plots)
    return 0 if all(complete(r) and not r.get("wrong") for r in run[section]) else 1


def draw_plots(run: dict[str, Any], folder: Path) -> bool:
    """Draws a run's plots and prints where they are, or what is missing. Returns whether they were drawn."""
    try:
        for path in plots.draw(run, folder):
            print(f"written: {path}")
    except MissingExtra as error:
        print(f"fusebackend: {error}", file=sys.stderr)
        return False
    return True


def _sigterm_raises(rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """``rows``; while they are made SIGTERM raises ``SystemExit``, so that worker processes are ended too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        yield from rows
    finally:
        signal.signal(signal.SIGTERM, before)
