"""The arguments of ``python -m fusebackend bench``. Imports nothing heavy; the commands do, when they run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusebackend.tools.command_line import positive, whole

#: ``fuse.gate``'s values.
GATES = ("auto", "measure", "race", "off")


def add_to(commands: Any) -> None:
    """Adds ``bench`` to an argument parser's subparsers."""
    parser = commands.add_parser("bench", help="measure this package beside its peers, in one run")
    parts = parser.add_subparsers(dest="what", required=True, metavar="what")

    part = _measuring(parts, "kernels", "kernels", "the families' kernels, in every way, against a floor")
    part.add_argument("--family", action="append", default=[], metavar="NAME", help="only this family (may be given again)")
    part.add_argument("--case", default="", metavar="TEXT", help="only cases whose name contains this")
    part.add_argument("--ways", type=_listed, default=[], metavar="A,B", help="only these of eager, inductor, inductor dynamic, ...")
    part.add_argument("--random", type=whole(0), default=0, metavar="COUNT", help="random shapes in place of the table's")
    part.add_argument("--seed", type=whole(0), default=0, help="of the random shapes")
    part.add_argument("--gate", choices=GATES, help="fuse.gate (default: off for the table, auto for random shapes)")

    part = _measuring(parts, "models", "models", "a step of public models, or of yours, with Inductor and with fuse")
    part.add_argument("--model", action="append", default=[], metavar="MODEL", help="a public model's name, or package.module:factory")
    part.add_argument("--kind", action="append", default=[], metavar="KIND", help="e.g. training-fp32; inference-bf16")
    part.add_argument("--patterns", type=_listed, default=[], metavar="A,B", help="only these patterns; --patterns=-A,-B: all but these")
    part.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option for torch.compile with fuse")
    part.add_argument("--steps", type=whole(1), default=3, help="training steps over which losses are compared (default 3)")

    part = _measuring(parts, "compile", "compile_times", "what the backend adds to the time of a compile, cold and warm")
    part.add_argument("--graph", action="append", default=[], metavar="NAME", help="only graphs whose name contains this")
    part.add_argument("--model", action="append", default=[], metavar="MODEL", help="a step of that model, as for models")
    part.add_argument("--kind", action="append", default=[], metavar="KIND", help="of the models (default: training-bf16)")
    part.add_argument("--repeats", type=whole(1), default=3, help="processes a figure (default 3)")

    part = _measuring(parts, "losses", "losses", "whether training with substitutions stays as close to float64 as training without")
    part.add_argument("--model", action="append", required=True, metavar="MODEL", help="as for models (may be given again)")
    part.add_argument("--patterns", type=_listed, default=["all"], metavar="A,B", help="what is replaced; all by default")
    part.add_argument("--seeds", type=whole(2), default=10, help="parameters and data to start from (default 10)")
    part.add_argument("--steps", type=whole(1), default=50, help="training steps a seed (default 50)")
    part.add_argument("--batch", type=whole(0), default=0, help="the inputs' first dim is cut to this")
    part.add_argument("--rate", type=positive, default=0.02, help="learning rate of SGD with momentum (default 0.02)")

    part = parts.add_parser("table", help="print the Markdown tables of what --output wrote")
    part.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    part.add_argument("--compare", type=Path, metavar="OLD.json", help="list the ratios that changed by more than 3 %% instead")
    part.set_defaults(run=_command("table"))

    part = parts.add_parser("plot", help="draw what --output wrote")
    part.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    part.add_argument("--plots", type=Path, default=Path("."), metavar="FOLDER", help="where to (default: here)")
    part.set_defaults(run=_command("plot"))


def _measuring(parts: Any, name: str, command: str, help: str) -> argparse.ArgumentParser:
    part = parts.add_parser(name, help=help)
    part.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures, as they come")
    part.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots (needs matplotlib)")
    part.add_argument("--compare", type=Path, metavar="OLD.json", help="list the ratios that changed by more than 3 %%")
    part.set_defaults(run=_command(command))
    return part


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """The function of that name in ``commands``, which is imported when it is called."""
    return lambda chosen: getattr(importlib.import_module("fusebackend.bench.commands"), name)(chosen)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
