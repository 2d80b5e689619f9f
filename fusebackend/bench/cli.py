"""The arguments of ``python -m fusebackend bench``, and what is printed while it measures."""

from __future__ import annotations

import argparse
import ast
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fusebackend.tools.factory import UsageError


def add_to(commands: Any) -> None:
    """Adds ``bench`` to an argument parser's subparsers."""
    parser = commands.add_parser("bench", help="measure the peers and ours in one run")
    parts = parser.add_subparsers(dest="what", required=True, metavar="what")

    part = _measuring(parts, "kernels", kernels, "the families' kernels, in every way, against a floor")
    part.add_argument("--family", action="append", default=[], metavar="NAME", help="only this family (may be given again)")
    part.add_argument("--case", default="", metavar="TEXT", help="only cases whose name contains this")
    part.add_argument("--ways", type=_listed, default=[], metavar="A,B", help="only these of eager, inductor, inductor dynamic, ...")
    part.add_argument("--random", type=int, default=0, metavar="COUNT", help="random shapes in place of the table's")
    part.add_argument("--seed", type=int, default=0, help="of the random shapes")

    part = _measuring(parts, "models", models, "a step of public models, or of yours, with Inductor and with ours")
    part.add_argument("--model", action="append", default=[], metavar="MODEL", help="a public model's name, or package.module:factory")
    part.add_argument("--kind", action="append", default=[], metavar="KIND", help="e.g. training-fp32; inference-bf16")
    part.add_argument("--patterns", type=_listed, default=[], metavar="A,B", help="only these patterns; --patterns=-A,-B: all but these")
    part.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option for torch.compile with ours")
    part.add_argument("--steps", type=int, default=3, help="training steps over which losses are compared (default 3)")

    part = _measuring(parts, "compile", compile_time, "what the backend adds to the time of a compile, cold and warm")
    part.add_argument("--graph", action="append", default=[], metavar="NAME", help="only graphs whose name contains this")
    part.add_argument("--repeats", type=int, default=3, help="processes a figure (default 3)")

    part = _measuring(parts, "losses", losses, "whether training with ours stays as close to float64 as training without")
    part.add_argument("--model", action="append", required=True, metavar="MODEL", help="as for models (may be given again)")
    part.add_argument("--patterns", type=_listed, default=["all"], metavar="A,B", help="what is replaced; all by default")
    part.add_argument("--seeds", type=int, default=10, help="parameters and data to start from (default 10)")
    part.add_argument("--steps", type=int, default=50, help="training steps a seed (default 50)")
    part.add_argument("--batch", type=int, default=0, help="the inputs' first dim is cut to this")
    part.add_argument("--rate", type=float, default=0.02, help="learning rate of SGD with momentum (default 0.02)")

    part = parts.add_parser("table", help="print the Markdown tables of what --output wrote")
    part.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    part.add_argument("--compare", type=Path, metavar="OLD.json", help="list the ratios that changed by more than 3 %% instead")
    part.set_defaults(run=table)

    part = parts.add_parser("plot", help="draw what --output wrote")
    part.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    part.add_argument("--plots", type=Path, default=Path("."), metavar="FOLDER", help="where to (default: here)")
    part.set_defaults(run=plot)


def _measuring(parts: Any, name: str, run: Callable, help: str) -> argparse.ArgumentParser:
    part = parts.add_parser(name, help=help)
    part.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures, as they come")
    part.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots (needs matplotlib)")
    part.add_argument("--compare", type=Path, metavar="OLD.json", help="list the ratios that changed by more than 3 %%")
    part.set_defaults(run=run)
    return part


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"{what} takes {', '.join(known)}; got {name!r}")


# ---- what is measured ----


def kernels(chosen: argparse.Namespace) -> int:
    from fusebackend.bench import kernels, pool
    from fusebackend.bench.device_time import this_device

    _known("--family", chosen.family, kernels.families())
    _known("--ways", chosen.ways, kernels.WAYS)
    jobs: list[pool.Job] = [*kernels.jobs(chosen.family, chosen.case, chosen.ways, chosen.random, chosen.seed)]
    if not jobs:
        raise UsageError(f"no case has {chosen.case!r} in its name" if chosen.case else "these families have no random shapes")

    ways: Sequence[str] = chosen.ways or list(kernels.RANDOM_WAYS if chosen.random else kernels.WAYS)
    found = pool.run(jobs, this_device(), alone=False)
    rows = ((jobs.index(job), {**job.names, **_figures(row)}) for job, row in found)
    return _measure(chosen, "random" if chosen.random else "kernels", rows, kernels.heading(ways), kernels.line)


def models(chosen: argparse.Namespace) -> int:
    from fusebackend.bench import model_steps, pool
    from fusebackend.bench.device_time import this_device
    from fusebackend.options import parse
    from fusebackend.rewriting.registry import known_names

    options = [_option(text) for text in chosen.option]
    if chosen.patterns:
        only_without = all(p.startswith("-") for p in chosen.patterns)
        options.append(("fuse.patterns", (*(["all"] if only_without else []), *chosen.patterns)))
    parse(None, dict(options), known_patterns=known_names())  # before the work, not after it
    jobs: list[pool.Job] = [*model_steps.jobs(chosen.model, chosen.kind, options, chosen.steps)]

    found = pool.run(jobs, this_device(), alone=True)
    rows = ((jobs.index(job), {**job.names, **_figures(row)}) for job, row in found)
    return _measure(chosen, "models", rows, model_steps.HEADING, model_steps.line)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option takes NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def compile_time(chosen: argparse.Namespace) -> int:
    from fusebackend.bench import compile_time
    from fusebackend.bench.device_time import this_device

    if chosen.repeats < 1:
        raise UsageError(f"--repeats takes a number from 1 on, got {chosen.repeats}")
    suited = [g for g in compile_time.GRAPHS if this_device().type == "cuda" or g not in compile_time.LARGE]
    graphs = [g for g in compile_time.GRAPHS if any(text in g for text in chosen.graph)] if chosen.graph else suited
    if not graphs:
        raise UsageError(f"--graph takes a part of {', '.join(compile_time.GRAPHS)}; got {', '.join(chosen.graph)}")
    rows = enumerate({**names, **_figures(row)} for names, row in compile_time.run(graphs, chosen.repeats))
    return _measure(chosen, "compile", rows, compile_time.HEADING, compile_time.line)


def losses(chosen: argparse.Namespace) -> int:
    from fusebackend.bench import losses
    from fusebackend.bench.model_zoo import MODELS
    from fusebackend.options import parse
    from fusebackend.rewriting.registry import known_names

    parse(None, {"fuse.patterns": chosen.patterns}, known_patterns=known_names())
    _known("--model", [m for m in chosen.model if ":" not in m], MODELS)
    if chosen.seeds < 2 or chosen.steps < 1 or chosen.batch < 0:
        raise UsageError(
            f"--seeds takes a number from 2 on, --steps from 1, --batch from 0; got {chosen.seeds}, {chosen.steps}, {chosen.batch}"
        )
    shared = {"patterns": tuple(chosen.patterns), "seeds": chosen.seeds, "steps": chosen.steps, "batch": chosen.batch, "rate": chosen.rate}
    settings = [losses.Setting(model, **shared) for model in chosen.model]
    rows = enumerate({**names, **_figures(row)} for names, row in losses.run(settings))
    return _measure(chosen, "losses", rows, losses.HEADING, losses.line)


def _figures(row: Any) -> dict[str, Any]:
    from fusebackend.bench.pool import Failure

    if not isinstance(row, Failure):
        return row
    missing = row.kind in ("ImportError", "ModuleNotFoundError")
    return {"failure": f"{row}; pip install 'fusebackend[models]' brings what the public models need" if missing else str(row)}


def _measure(chosen: argparse.Namespace, section: str, rows: Iterable[tuple[int, dict[str, Any]]], heading: str, line: Callable) -> int:
    """Prints rows as they come and keeps them in order; then what was asked for besides.

    Returns 1 if a row has no figures, or wrong ones.
    """
    from fusebackend.bench import results
    from fusebackend.bench.device_time import environment

    old = results.read(chosen.compare) if chosen.compare else None
    for path in [p for p in (chosen.output, chosen.plots) if p]:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
    data: dict[str, Any] = {"environment": environment(), section: []}
    print(results.describe(data["environment"]), heading, sep="\n\n", flush=True)
    began, kept = time.perf_counter(), {}
    for place, row in _stopped_in_order(rows):
        kept[place] = row
        data[section] = [kept[i] for i in sorted(kept)]
        data["seconds"] = round(time.perf_counter() - began)
        names = " ".join(str(row[n]) for n in results.SECTIONS[section])
        print(line(row) if results.complete(row) else f"{names:44}no figures: {row['failure']}", flush=True)
        if chosen.output:
            results.write(chosen.output, data)
    print(results.summary(section, data[section]))
    if old:
        print(results.changes(data, old))
    if chosen.plots:
        _draw(data, chosen.plots)
    return 0 if all(results.complete(r) and not r.get("wrong") for r in data[section]) else 1


def _stopped_in_order(rows: Iterable) -> Iterator:
    """``rows``; while they are made, SIGTERM raises, so that worker processes are ended too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        yield from rows
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what was measured ----


def table(chosen: argparse.Namespace) -> int:
    from fusebackend.bench import results

    data = results.merged(map(results.read, chosen.files))
    print(results.changes(data, results.read(chosen.compare)) if chosen.compare else results.markdown(data))
    return 0


def plot(chosen: argparse.Namespace) -> int:
    from fusebackend.bench import results

    return 0 if _draw(results.merged(map(results.read, chosen.files)), chosen.plots) else 1


def _draw(data: dict[str, Any], folder: Path) -> bool:
    from fusebackend.bench import plots

    try:
        for path in plots.draw(data, folder):
            print(f"written: {path}")
    except plots.MissingExtra as error:
        print(f"fusebackend: {error}", file=sys.stderr)
        return False
    return True
