"""The commands of ``python -m fusebackend bench``. Each checks its arguments, measures, and returns the exit status."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fusebackend.bench import compile_time, loss_distance, model_steps, process_pool, result_file
from fusebackend.bench import kernels as kernel_cases
from fusebackend.bench.comparison import changes
from fusebackend.bench.environment import default_device
from fusebackend.bench.extras import optional
from fusebackend.bench.job import Failure, Job
from fusebackend.bench.measure import draw_plots, measure
from fusebackend.bench.model_zoo import MODELS
from fusebackend.bench.rows import Row
from fusebackend.bench.tables import markdown
from fusebackend.bench.workload import KINDS
from fusebackend.options import parse
from fusebackend.rewriting.registry import families, known_names
from fusebackend.tools.object_reference import UsageError, resolve


def kernels(chosen: argparse.Namespace) -> int:
    _check_known("--family", chosen.family, families())
    _check_known("--ways", chosen.ways, kernel_cases.WAYS)
    jobs = kernel_cases.jobs(chosen.family, chosen.case, chosen.ways, chosen.random, chosen.seed, chosen.gate)
    if not jobs:
        raise UsageError(f"no case has {chosen.case!r} in its name" if chosen.case else "these families have no random shapes")
    ways = chosen.ways or (kernel_cases.RANDOM_WAYS if chosen.random else list(kernel_cases.WAYS))
    rows = _measured(jobs, process_per_job=False)
    return measure(chosen, "random" if chosen.random else "kernels", rows, kernel_cases.heading(ways), kernel_cases.line)


def models(chosen: argparse.Namespace) -> int:
    options = [_option(text) for text in chosen.option]
    if chosen.patterns:
        only_without = all(p.startswith("-") for p in chosen.patterns)
        options.append(("fuse.patterns", (*(["all"] if only_without else []), *chosen.patterns)))
    _check_options(dict(options))
    _check_models(chosen.model)
    jobs = model_steps.jobs(chosen.model, chosen.kind, options, chosen.steps)
    return measure(chosen, "models", _measured(jobs, process_per_job=True), model_steps.HEADING, model_steps.line)


def compile_times(chosen: argparse.Namespace) -> int:
    suited = [g for g in compile_time.GRAPHS if default_device().type == "cuda" or g not in compile_time.LARGE]
    graphs = [g for g in compile_time.GRAPHS if any(text in g for text in chosen.graph)]
    if chosen.graph and not graphs:
        raise UsageError(f"--graph takes a part of {', '.join(compile_time.GRAPHS)}; got {', '.join(chosen.graph)}")
    _check_models(chosen.model)
    _check_known("--kind", chosen.kind, KINDS)
    if chosen.kind and not chosen.model:
        raise UsageError("--kind is of models: --model names one")
    graphs += [compile_time.of_model(model, kind) for model in chosen.model for kind in chosen.kind or ["training-bf16"]]
    rows = _numbered(compile_time.run(graphs or suited, chosen.repeats))
    return measure(chosen, "compile", rows, compile_time.HEADING, compile_time.line)


def losses(chosen: argparse.Namespace) -> int:
    _check_options({"fuse.patterns": chosen.patterns})
    _check_models(chosen.model)
    optional("scipy.stats", "bench losses")  # raises before the work, not after it
    shared = {"patterns": tuple(chosen.patterns), "seeds": chosen.seeds, "steps": chosen.steps, "batch": chosen.batch, "rate": chosen.rate}
    rows = _numbered(loss_distance.run([loss_distance.Setting(model, **shared) for model in chosen.model]))
    return measure(chosen, "losses", rows, loss_distance.HEADING, loss_distance.line)


def table(chosen: argparse.Namespace) -> int:
    run = result_file.merged(map(result_file.read, chosen.files))
    print(changes(run, result_file.read(chosen.compare)) if chosen.compare else markdown(run))
    return 0


def plot(chosen: argparse.Namespace) -> int:
    return 0 if draw_plots(result_file.merged(map(result_file.read, chosen.files)), chosen.plots) else 1


def _check_known(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"{argument} takes {', '.join(known)}; got {name!r}")


# The work starts after all arguments were checked, those that workers would look at too.


def _check_options(options: dict[str, Any]) -> None:
    try:
        parse(None, options, known_patterns=known_names())
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _check_models(models: Iterable[str]) -> None:
    for model in models:
        if ":" in model:
            resolve(model, "--model")
        elif model not in MODELS:
            raise UsageError(f"--model takes package.module:factory or one of {', '.join(MODELS)}; got {model!r}")


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option takes NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _measured(jobs: Sequence[Job], *, process_per_job: bool) -> Iterator[tuple[int, Row]]:
    """The position and the row of each job, as they are measured."""
    for job, row in process_pool.run(jobs, default_device(), process_per_job=process_per_job):
        yield jobs.index(job), _row(job.names, row)


def _numbered(rows: Iterable[tuple[dict[str, str], Row | Failure]]) -> Iterator[tuple[int, Row]]:
    return enumerate(_row(names, row) for names, row in rows)


def _row(names: dict[str, str], found: Row | Failure) -> Row:
    """A row with its names; that of a failure has the reason under ``failure``."""
    if not isinstance(found, Failure):
        return {**names, **found}
    missing = found.kind in ("ImportError", "ModuleNotFoundError")
    hint = "; pip install 'fusebackend[models]' brings what the public models need" if missing else ""
    return {**names, "failure": f"{found}{hint}"}
