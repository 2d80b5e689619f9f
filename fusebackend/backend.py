"""The entry points of ``torch.compile(model, backend="fuse")``.

The backend never touches the graph that Dynamo hands over: it gives Inductor its passes and calls it. So modes, CUDA graphs, autotuning
and both of Inductor's caches work as they do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor import compile_fx as inductor

from fusebackend.log import log
from fusebackend.native import loader
from fusebackend.options import parse
from fusebackend.report import history
from fusebackend.report.model import Report
from fusebackend.rewriting import fuel
from fusebackend.rewriting.registry import all_patterns
from fusebackend.session import Session, inductor_patches


def fuse(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Callable:
    """Compiles a Dynamo graph through Inductor, with this package's substitutions.

    Args:
        gm: the graph, as Dynamo gives it.
        example_inputs: fake or real inputs, as Dynamo gives them.
        mode: torch.compile's mode.
        options: ours (:data:`fusebackend.options.OPTIONS`), ``"mode"``, and Inductor's.

    Returns:
        The compiled function.

    Raises:
        ValueError: an unknown option or mode (see :func:`fusebackend.options.parse`).
    """
    library = loader.load()
    known = all_patterns()
    chosen = parse(mode, options, known_patterns=[p.name for p in known])
    try:
        session = Session(chosen, library, known, gm, example_inputs)
    except Exception as error:  # a defect of ours, which must not fail the compile
        if chosen.strict:
            raise
        patches = inductor_patches(chosen)  # raises where it is no defect: a value of a type that Inductor does not take
        note = f"all is left to Inductor: preparing the compile raised {type(error).__name__}: {error}"
        log.warning(note, exc_info=True)
        history.add(Report(notes=[note]))
        compiled: Any = inductor.compile_fx(gm, example_inputs, config_patches=patches)
        return compiled
    history.add(session.report)
    compiled = inductor.compile_fx(gm, example_inputs, inner_compile=session.inner_compile, config_patches=session.config_patches)
    session.end()
    return compiled


def _reset() -> None:
    """Called by torch._dynamo.reset()."""
    fuel.reset()
    history.reset()


fuse.reset = _reset  # type: ignore[attr-defined]


def inductor_configs(*, mode: str | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Inductor's configuration with this package's substitutions, for compilers that take one instead of a backend.

        program = torch.export.export(model, inputs)
        path = torch._inductor.aoti_compile_and_package(program, inductor_configs=fusebackend.inductor_configs())

    A program that runs the package calls :func:`load_operators` first. Make a new configuration for each compile: :func:`last_report`
    tells what was substituted in the last.

    Args:
        mode, options: as for ``torch.compile``.

    Raises:
        ValueError: an unknown option or mode, or ``fuse.interpret``, which makes no code.
    """
    library = loader.load()
    known = all_patterns()
    chosen = parse(mode, options, known_patterns=[p.name for p in known])
    if chosen.interpret:
        raise ValueError("inductor_configs: fuse.interpret runs graphs without code, and code is what a package holds")
    session = Session(chosen, library, known)
    history.add(session.report)
    return session.config_patches


def load_operators() -> None:
    """Defines the operators of this package and loads their kernels, for a program that runs code compiled elsewhere.

    Raises:
        RuntimeError: there is no native library; the message says why.
    """
    all_patterns()
    library = loader.load()
    if library.path is None:
        raise RuntimeError(f"no native library: {library.reason}")


def last_report() -> Report | None:
    """The report of the last graph that this process compiled with ``backend="fuse"``, also one that came from Inductor's cache; None
    before the first.

    A training graph's backward joins its report when it is compiled, at the first backward call. A model with graph breaks gives one
    report a graph: see :func:`reports`.
    """
    found = history.last()
    return found[-1] if found else None


def reports() -> list[Report]:
    """The reports of the last compiles of this process (256 at most) since ``torch._dynamo.reset()``, oldest first."""
    return history.last()
