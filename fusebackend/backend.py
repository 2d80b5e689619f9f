"""The entry point of ``torch.compile(model, backend="fuse")``.

The backend never touches the graph that Dynamo hands over: it gives Inductor its passes and calls it. So modes, CUDA
graphs, autotuning and both of Inductor's caches work as they do without it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusebackend import __version__
from fusebackend import fx_utils as g
from fusebackend.log import log, warn_once
from fusebackend.native import build, loader
from fusebackend.options import Options, parse
from fusebackend.profitability import graph_race as race
from fusebackend.profitability.decision_record import Record
from fusebackend.profitability.policy import Gate
from fusebackend.report import model as report
from fusebackend.rewriting import interpret
from fusebackend.rewriting.apply import Fuel
from fusebackend.rewriting.inductor_pass import SLOTS, FusePass, chained
from fusebackend.rewriting.pattern import Level
from fusebackend.rewriting.registry import all_patterns, select

_fuel: dict[int, Fuel] = {}
_reports: collections.deque[report.Report] = collections.deque(maxlen=256)
_forced_fuel: contextvars.ContextVar[Fuel | None] = contextvars.ContextVar("forced_fuel", default=None)
_collector: contextvars.ContextVar[list[report.Report] | None] = contextvars.ContextVar("collector", default=None)


def fuse(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Callable:
    """Compiles a Dynamo graph through Inductor, with this package's substitutions.

    Args:
        gm: the graph, as Dynamo gives it.
        example_inputs: fake or real inputs, as Dynamo gives them.
        mode: torch.compile's mode.
        options: own ones (:data:`fusebackend.options.OPTIONS`), ``"mode"``, and Inductor's.

    Raises:
        ValueError: an unknown option or mode (see :func:`fusebackend.options.parse`).
    """
    library = loader.load()
    began = time.perf_counter()
    chosen = parse(mode, options)
    result = report.Report(notes=[library.reason] if library.reason else [])
    foreign = sorted({type(i).__name__ for i in example_inputs if _is_foreign(i)})
    if foreign:
        chosen = dataclasses.replace(chosen, patterns=())
        result.notes.append(f"{', '.join(foreign)}: inputs of a tensor subclass that is not traced through; all is left to Inductor")
    identity = uuid(chosen, library)
    if identity is not None:
        identity += _magnitudes(gm)
    explained = _collector.get()
    interpreted = chosen.interpret or explained is not None
    name = None if interpreted or not chosen.cacheable or identity is None else _report_key(gm, example_inputs, identity, chosen)

    fuel = _forced_fuel.get() or _fuel_for(chosen)
    record = Record(report.decisions_path(name) if name else None, remeasures=chosen.gate != "auto")
    traced = False
    patches, racing = _with_passes(
        chosen,
        f"{identity}{record.token}" if identity is not None and fuel is None else None,
        result,
        record,
        timing=not interpreted,
        fuel=fuel,
        code=explained is not None,
        prefix=f"{len(explained)}: " if explained else "",  # several graphs of one explanation are told apart by number
        done=lambda: _graph_done(result, record, name, traced),
    )
    if interpreted:
        patches.update(interpret.PATCHES)
    if explained is not None:
        explained.append(result)
    else:
        _reports.append(result)

    result.seconds += time.perf_counter() - began
    inner: Any = interpret.inner_compile if interpreted else inductor.compile_fx_inner
    if racing is not None and not interpreted and fuel is None:
        inner = racing
    compiled: Any = inductor.compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
    if name:
        _complete_from_cache(result, name)
    report.trace(result)
    traced = True
    return compiled


def inductor_configs(*, mode: str | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Inductor's configuration with this package's substitutions, for compilers that take one instead of a backend.

        program = torch.export.export(model, inputs)
        path = torch._inductor.aoti_compile_and_package(program, inductor_configs=fusebackend.inductor_configs())

    A program that runs the package calls :func:`load_operators` first. Make a new configuration for each compile:
    :func:`last_report` tells what was substituted in the last.

    Args:
        mode, options: as for ``torch.compile``.

    Raises:
        ValueError: an unknown option or mode, or ``fuse.interpret``, which makes no code.
    """
    library = loader.load()
    chosen = parse(mode, options)
    if chosen.interpret:
        raise ValueError("inductor_configs: fuse.interpret runs graphs without code, and code is what a package holds")
    result = report.Report(notes=[library.reason] if library.reason else [])
    patches, _ = _with_passes(chosen, uuid(chosen, library), result, Record(), timing=False, fuel=_fuel_for(chosen))
    _reports.append(result)
    return patches


def load_operators() -> None:
    """Defines the operators of this package and loads their kernels, for a program that runs code compiled elsewhere.

    Raises:
        RuntimeError: there is no native library; the message says why.
    """
    all_patterns()
    library = loader.load()
    if library.path is None:
        raise RuntimeError(f"no native library: {library.reason}")


def _is_foreign(value: Any) -> bool:
    """A tensor subclass that reaches the compiled code as it is, where torch's first-call check refuses any custom operator."""
    if isinstance(value, torch.nn.Parameter):
        value = value.data
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return isinstance(value, torch.Tensor) and type(value) not in plain and not is_traceable_wrapper_subclass(value)


def _graph_done(result: report.Report, record: Record, name: str | None, traced: bool) -> None:
    if name:
        report.save(result, name)
        record.save()
    if traced:  # a backward, compiled at its first call, after this compile was traced
        report.trace(result)


def _reset() -> None:
    """Called by torch._dynamo.reset()."""
    _fuel.clear()
    _reports.clear()


fuse.reset = _reset  # type: ignore[attr-defined]


def uuid(chosen: Options, library: loader.Native) -> str | None:
    """Everything of ours that the compiled code depends on, in one string, for the keys of Inductor's caches; None if a
    pattern can't say what it does: nothing is cached then."""
    parts = [__version__, _sources_hash(), chosen.digest(), library.key, repr(library.architectures), str(library.reason)]
    for pattern in select(chosen.patterns):
        try:
            parts.append(pattern.fingerprint())
        except Exception as error:
            if chosen.strict:
                raise
            warn_once(f"pattern {pattern.name!r}: fingerprint raised {type(error).__name__}: {error} (Inductor's caches are off)")
            return None
    return "fusebackend-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _magnitudes(gm: fx.GraphModule) -> str:
    """How large the symbolic sizes are that this compile sees, to a factor of 16. What pays is decided by them, so code that was
    compiled at a few rows must not serve a million from Inductor's cache, whose guards would let it."""
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    sizes = (s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,)) if isinstance(s, torch.SymInt))
    return "".join(f"-{round(math.log2(max(1, hint)) / 4)}" for s in sizes if (hint := g.hint(s)) is not None)


@functools.lru_cache
def _sources_hash() -> str:
    """Hash of this package's Python files: what is matched and what is refused depends on more than a pattern's own file."""
    patterns = importlib.import_module("fusebackend.patterns")
    roots = (Path(__file__).parent, *map(Path, patterns.__path__))
    return "".join(build.content_hash(root, (".py",)) for root in roots)


def last_report() -> report.Report | None:
    """The report of the last graph that this process compiled with ``backend="fuse"``, also one that came from
    Inductor's cache; None before the first. A training graph's backward joins its report when it is compiled, at the
    first backward call. A model with graph breaks gives one report a graph: see :func:`reports`."""
    return _reports[-1] if _reports else None


def reports() -> list[report.Report]:
    """The reports of the last compiles of this process (256 at most) since ``torch._dynamo.reset()``, oldest first."""
    return list(_reports)


@contextlib.contextmanager
def collecting() -> Iterator[list[report.Report]]:
    """Compiles within are interpreted, use no cache, and put their reports into the list that this yields."""
    found: list[report.Report] = []
    token = _collector.set(found)
    try:
        yield found
    finally:
        _collector.reset(token)


@contextlib.contextmanager
def forced_fuel(fuel: Fuel) -> Iterator[Fuel]:
    """Compiles within share ``fuel``, whatever their options say, and use no cache."""
    token = _forced_fuel.set(fuel)
    try:
        yield fuel
    finally:
        _forced_fuel.reset(token)


def _with_passes(
    chosen: Options, identity: str | None, result: report.Report, record: Record, *, timing: bool, **more: Any
) -> tuple[dict[str, Any], Callable | None]:
    """Inductor's configuration for the user's mode and options, with our passes behind the user's; and what stands in for
    Inductor's ``compile_fx_inner`` where graphs are raced.

    Args:
        record: where the gate remembers what it decided.
        timing: whether the gate may time anything.
        more: as for :class:`fusebackend.rewriting.inductor_pass.FusePass`.
    """
    patches = _inductor_patches(chosen)
    without = {slot: patches.get(slot, getattr(inductor_config, slot)) for slot in SLOTS.values()}  # our passes
    gate = None
    if chosen.gate != "off":
        settings = {**patches, **without}
        gate = Gate(chosen.gate, chosen.gate_seconds, result, settings, record, timing=timing, strict=chosen.strict)
    own = {}
    levels: set[Level] = {"post_grad"}  # which also records the graph
    levels.update(p.level for p in select(chosen.patterns))
    for level in levels:
        own[level] = FusePass(
            level,
            chosen.patterns,
            identity if chosen.cacheable else None,
            result,
            strict=chosen.strict,
            check=chosen.check == "numeric",
            gate=gate,
            **more,
        )
        patches[SLOTS[level]] = chained(SLOTS[level], own[level], patches)
    return patches, race.racing(gate, own["post_grad"], without) if gate and chosen.gate == "race" else None


def _inductor_patches(chosen: Options) -> dict[str, Any]:
    # torch.compile's own wrapper knows what a mode means, checks types, and sets what CUDA graphs need.
    return dict(torch._TorchCompileInductorWrapper(chosen.mode, dict(chosen.inductor), None).config)


def _fuel_for(chosen: Options) -> Fuel | None:
    """One tank for all compiles with the same limit, so that graph breaks don't fill it up again."""
    return None if chosen.fuel is None else _fuel.setdefault(chosen.fuel, Fuel(chosen.fuel))


def _report_key(gm: fx.GraphModule, example_inputs: Sequence[Any], identity: str, chosen: Options) -> str | None:
    try:
        return report.key(gm, example_inputs, f"{identity}\0{chosen.mode}\0{chosen.inductor!r}")
    except Exception as error:  # a report must never cost a compile
        log.warning("the report of this compile can't be kept: %s: %s", type(error).__name__, error)
        return None


def _complete_from_cache(result: report.Report, name: str) -> None:
    """Adds the graphs whose code came from Inductor's cache, so that our pass did not see them, from the kept report."""
    kept = report.load(name)
    seen = {c.name for c in result.graphs}
    if kept is not None:
        for missing in [c for c in kept.graphs if c.name not in seen]:
            result.graphs.append(missing)
            result.substitutions += [s for s in kept.substitutions if s.graph == missing.name]
            result.rejections += [r for r in kept.rejections if r.graph == missing.name]
            raced = any(v.graph == missing.name for v in result.verdicts)  # a kept race is looked up before the code is
            known = [v for v in kept.verdicts if v.graph == missing.name and not (raced and not v.pattern)]
            result.verdicts += [dataclasses.replace(v, why="cached") for v in known]
    if "forward" not in seen:
        result.from_cache = True
        if kept is None:
            result.notes.append("the compiled code came from Inductor's cache, and the report of that compile is not kept")
    else:
        report.save(result, name)
