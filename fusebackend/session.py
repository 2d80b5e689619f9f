"""One compile: what enters its cache keys, what Inductor is given, and its report."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusebackend import __version__, cache_keys
from fusebackend.identity import UnidentifiableError
from fusebackend.log import log, warn_once
from fusebackend.native.loader import Native
from fusebackend.options import Options
from fusebackend.profitability import calibration
from fusebackend.profitability.decision_record import DecisionRecord
from fusebackend.profitability.graph_race import racing
from fusebackend.profitability.joint_race import JointRace
from fusebackend.profitability.policy import Gate
from fusebackend.profitability.raced_graphs import copied
from fusebackend.report import history, store
from fusebackend.report.context import compile_context
from fusebackend.report.model import Report
from fusebackend.rewriting import convolution_layout, describe, interpret, provenance
from fusebackend.rewriting.fuel import Fuel, fuel_for
from fusebackend.rewriting.inductor_pass import SLOTS, FusePass, chained
from fusebackend.rewriting.outcome import GraphOutcome, Verdict
from fusebackend.rewriting.pattern import Level, Pattern
from fusebackend.rewriting.switches import select

#: Of graphs that are known to no report.
_NOT_KEPT = "the compiled code came from Inductor's cache, and the report of that compile is not kept"


class Session:
    """One compile of a Dynamo graph, or one configuration for Inductor.

    Args:
        options: what the user asked for.
        library: the native library, or why there is none.
        known: the patterns that are known when the compile begins. Others may come and go while it runs.
        gm, example_inputs: as the backend is given them; None for a configuration, whose compile is not ours: nothing is timed and its
            report is not kept.

    Attributes:
        report: of this compile; the backward, which is compiled at its first call, is added to it then.
        config_patches: Inductor's configuration for the user's mode and options, with our passes behind the user's.
        inner_compile: what Inductor compiles graphs with.
    """

    def __init__(
        self,
        options: Options,
        library: Native,
        known: Sequence[Pattern],
        gm: fx.GraphModule | None = None,
        example_inputs: Sequence[Any] = (),
    ):
        began = time.perf_counter()
        self.report = Report(notes=[library.reason] if library.reason else [], context=compile_context(options.given(), example_inputs))
        if gm is not None and (broken := provenance.graph_break(gm)) is not None:
            self.report.breaks.append(broken)
        self._outcomes: dict[str, GraphOutcome] = {}
        self._chosen: Verdict | None = None  # of the memory order of the graph that is compiled now
        self._orders: dict[str, Verdict] = {}  # by graph, of the one forward
        self._ended = False
        self._gm = gm
        opaque = sorted({type(i).__name__ for i in example_inputs if _is_opaque(i)})
        if opaque:
            # Not interpreted either: the operators of a graph that is run as it is meet the subclass, under the check of the first call.
            options = dataclasses.replace(options, patterns=(), interpret=False)
            self.report.notes.append(
                f"{', '.join(opaque)}: inputs of a tensor subclass that is not traced through; all is left to Inductor"
            )

        self._patterns = select(options.patterns, known)
        self._inputs_called = provenance.input_names(gm) if gm is not None else ()

        collected = history.collected() if gm is not None else None
        self._explained, interpreted = collected is not None, options.interpret or collected is not None
        # Several graphs of one explanation are told apart by number.
        self._prefix = f"{len(collected)}: " if collected else ""

        fuel = fuel_for(options.fuel)
        code_key = code_identity(options, library, self._patterns) if options.cacheable and fuel is None else None
        if code_key is not None and gm is not None:
            code_key += cache_keys.magnitudes(gm)
        patches = inductor_patches(options)
        self._key = _report_key(gm, example_inputs, code_key, patches) if gm is not None and code_key and not interpreted else None
        decisions = store.path(self._key).with_suffix(".gate.json") if self._key else None
        self._record = DecisionRecord(decisions, remeasures=options.gate != "auto")

        uuid = None if code_key is None else f"{code_key}{self._record.token}"
        timing = gm is not None and not interpreted
        self._configure(options, patches, uuid, fuel, interpreted, timing, has_library=library.path is not None)
        self._seconds = time.perf_counter() - began
        self._update_report()

    def _configure(
        self,
        options: Options,
        patches: dict[str, Any],
        uuid: str | None,
        fuel: Fuel | None,
        interpreted: bool,
        timing: bool,
        has_library: bool,
    ) -> None:
        without: dict[str, Any] = {slot: patches.get(slot, getattr(inductor_config, slot)) for slot in SLOTS.values()}  # our passes
        gate = None
        if options.gate != "off":
            gate = Gate(options.gate, options.gate_seconds, {**patches, **without}, self._record, timing=timing, strict=options.strict)
        races = gate is not None and options.gate == "race" and timing and fuel is None
        levels: set[Level] = {"post_grad"}  # without patterns too: it records the graph
        levels.update(p.level for p in self._patterns)
        passes = {
            level: FusePass(
                level,
                options.patterns,
                uuid,
                self.add,
                strict=options.strict,
                fuel=fuel,
                check=options.check == "numeric",
                policy=gate,
                code=self._explained,
                prefix=self._prefix,
                patterns=self._patterns,
                inputs_called=self._inputs_called,
                copy=copied if races and level == "joint" else None,
            )
            for level in levels
        }
        timed = {**patches, **without}
        patches.update({SLOTS[level]: chained(SLOTS[level], own, patches) for level, own in passes.items()})
        self.config_patches = {**patches, **(interpret.PATCHES if interpreted else {})}
        self.inner_compile: Callable = inductor.compile_fx_inner
        if interpreted:  # of what is explained alone nobody reads the results
            self.inner_compile = functools.partial(interpret.inner_compile, as_compiled=not options.interpret)
        if gate is not None and races:
            joint = JointRace(gate, passes["joint"], without, timed) if "joint" in passes else None
            if joint is not None:
                users = self.config_patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
                self.config_patches["custom_partitioner_fn"] = joint.partitioner(users)
            self.inner_compile = racing(gate, passes["post_grad"], without, joint)
        prefers = None  # with fuel, too: it bounds what is done here by counting substitutions, and this is none
        if gate is not None and fuel is None and options.chooses_memory_order:
            replacing = [p for p in self._patterns if p.replaces_scatters] if has_library else []
            prefers = functools.partial(self._prefers_channels_last, gate, replacing)
        # A race compiles a graph several times, also without us, and reports itself.
        self._keeps_graphs = uuid is not None and not races and not interpreted
        self.inner_compile = self._one_graph(convolution_layout.deciding_first(self.inner_compile, prefers))

    def _prefers_channels_last(self, gate: Gate, replacing: Sequence[Pattern], convolutions: Sequence[fx.Node]) -> bool:
        began = time.perf_counter()
        verdict = self._chosen = gate.memory_order(convolutions, replacing)
        log.info("%s: %s", verdict.pattern, verdict)
        self._seconds += time.perf_counter() - began
        return verdict.applied

    def _one_graph(self, inner_compile: Callable) -> Callable:
        """The same, which keeps what was done to a graph under Inductor's key of its code, and finds it there where the code was kept: it
        may be of another program, whose report has another key. After it the memory order of the next graph is open again."""

        @functools.wraps(inner_compile)
        def compile_one(*args: Any, **kwargs: Any) -> Any:
            before = dict(self._outcomes)
            try:
                compiled = inner_compile(*args, **kwargs)
                key = getattr(compiled, "_fx_graph_cache_key", None)  # None where it is not cached
                if key is not None and self._keeps_graphs:
                    self._keep_or_find(cache_keys.graph(key), [o for n, o in self._outcomes.items() if o is not before.get(n)])
                return compiled
            finally:
                self._chosen = None

        return compile_one

    def _keep_or_find(self, key: str, compiled: Sequence[GraphOutcome]) -> None:
        """Args: compiled: what was done to the graph, and to those inside it; nothing where its code was kept."""
        if compiled:
            store.save(_report_of(compiled), key)
        elif (kept := store.load(key)) is not None:
            self.report.from_cache = True
            for outcome in _outcomes_of(kept):
                self.add(self._of_kept_code(outcome))

    def add(self, outcome: GraphOutcome) -> None:
        """Puts the outcome of a graph into the report, in place of an earlier one."""
        began = time.perf_counter()
        self._outcomes[outcome.graph] = outcome
        if self._chosen is not None and "joint" not in outcome.graph:
            self._orders = {outcome.graph: dataclasses.replace(self._chosen, graph=outcome.graph)}
        self._update_report()
        if self._ended:  # a backward, compiled at its first call: this compile was kept and traced without it
            self._keep()
            store.trace(self.report)
        self._seconds += time.perf_counter() - began
        self.report.seconds += time.perf_counter() - began

    def end(self) -> None:
        """Once Inductor has compiled: completes the report with graphs whose code came from Inductor's cache, and keeps it."""
        compiled_here = bool(self._outcomes)
        if self._key and self._complete_from_cache(self._key) and compiled_here:
            self._keep()
        store.trace(self.report)
        _ = self._places  # for a backward, which is compiled later
        self._ended, self._gm = True, None

    def _complete_from_cache(self, key: str) -> bool:
        """Our passes do not see a graph whose code comes from the cache: its outcome is in the kept report.

        Returns:
            Whether it is to be kept: it is complete, or the first that is known of substitutions before the partitioner.
        """
        seen = {name for name, outcome in self._outcomes.items() if outcome.code is not None}
        if "forward" in seen:  # and whatever comes after it is compiled anew
            return True
        kept = store.load(key)
        for outcome in _outcomes_of(kept) if kept is not None else ():
            if outcome.graph in seen:
                continue
            # A race looks its measurement up before Inductor looks up the code: it has reported here already.
            raced = self._outcomes[outcome.graph].verdicts if outcome.graph in self._outcomes else ()
            own = tuple(v for v in outcome.verdicts if v.pattern or not raced)
            outcome = self._of_kept_code(dataclasses.replace(outcome, verdicts=own))
            self._outcomes[outcome.graph] = dataclasses.replace(outcome, verdicts=(*raced, *outcome.verdicts))
        self._update_report()
        self.report.from_cache = True
        if kept is None or _NOT_KEPT in kept.notes:
            self.report.notes.append(_NOT_KEPT)
            log.info(_NOT_KEPT)
        # Two programs may be one and the same behind the partitioner: then Inductor has the code of the second, and keeps under its own key
        # what was done before.
        return kept is not None or "joint" in seen

    def _of_kept_code(self, outcome: GraphOutcome) -> GraphOutcome:
        """What was done to code that is used again, said of the program that is compiled now."""
        verdicts = tuple(dataclasses.replace(v, why="cached") for v in outcome.verdicts)
        outcome = _with_owners(dataclasses.replace(outcome, verdicts=verdicts), *self._places)
        _log_kept(outcome)
        return outcome

    @functools.cached_property
    def _places(self) -> tuple[set[tuple[str, int]], set[str]]:
        """The lines and the modules of the program that is compiled."""
        return (set(), set()) if self._gm is None else (describe.lines_of(self._gm), provenance.modules_of(self._gm))

    def _keep(self) -> None:
        if self._key:
            store.save(self.report, self._key)
            self._record.save()

    def _update_report(self) -> None:
        outcomes = self._outcomes.values()
        _fill(self.report, outcomes, self._orders.values())
        self.report.seconds = self._seconds + sum(o.seconds for o in outcomes)


def inductor_patches(options: Options) -> dict[str, Any]:
    """Inductor's configuration for the user's mode and options, without our passes."""
    # torch.compile's own wrapper knows what a mode means, checks types, and sets what CUDA graphs need.
    return dict(torch._TorchCompileInductorWrapper(options.mode, dict(options.inductor), None).config)


def code_identity(options: Options, library: Native, patterns: Sequence[Pattern] | None = None) -> str | None:
    """Identifies everything of ours that compiled code depends on; None if a pattern can't say what it does: nothing is cached then.

    Args:
        patterns: those that the options select; None asks for them.
    """
    fingerprints = []
    for pattern in select(options.patterns) if patterns is None else patterns:
        try:
            fingerprints.append(pattern.fingerprint())
        except UnidentifiableError as error:
            warn_once(
                f"pattern {pattern.name!r}: {error}: what is compiled with it is not cached. Define it in a file that is imported, and "
                "let it read only what that file and others hold; or give it a fingerprint() of its own"
            )
            return None
        except Exception as error:
            if options.strict:
                raise
            warn_once(f"pattern {pattern.name!r}: fingerprint raised {type(error).__name__}: {error} (Inductor's caches are off)")
            return None
    described = (library.key, repr(library.architectures), str(library.reason))
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])] if options.gate != "off" else []
    known = [calibration.digest(torch.device(kind)) for kind in kinds]
    return cache_keys.compiled_code(__version__, vars(options), (*described, *known), fingerprints)


def _report_key(gm: fx.GraphModule, example_inputs: Sequence[Any], code_key: str, patches: Mapping[str, Any]) -> str | None:
    try:
        changed = {n: v for n, v in patches.items() if getattr(inductor_config, n) != v}
        return cache_keys.report(gm, example_inputs, code_key, changed)
    except Exception as error:  # a report must never cost a compile
        log.warning("the report of this compile can't be kept: %s: %s", type(error).__name__, error)
        return None


def _report_of(outcomes: Sequence[GraphOutcome]) -> Report:
    report = Report()
    _fill(report, outcomes)
    return report


def _fill(report: Report, outcomes: Collection[GraphOutcome], before: Iterable[Verdict] = ()) -> None:
    """What happened to graphs, as a report has it: by kind.

    Args:
        before: verdicts that are about no match.
    """
    report.substitutions = [s for o in outcomes for s in o.substitutions]
    report.rejections = [r for o in outcomes for r in o.rejections]
    report.graphs = [o.code for o in outcomes if o.code is not None]
    report.verdicts = [*before, *(v for o in outcomes for v in o.verdicts)]


def _outcomes_of(report: Report) -> list[GraphOutcome]:
    """What a kept report says, by graph."""

    def of(graph: str, items: Iterable[Any]) -> tuple:
        return tuple(i for i in items if i.graph == graph)

    return [
        GraphOutcome(c.name, of(c.name, report.substitutions), of(c.name, report.rejections), of(c.name, report.verdicts), c)
        for c in report.graphs
    ]


def _with_owners(outcome: GraphOutcome, lines: set[tuple[str, int]], modules: set[str]) -> GraphOutcome:
    """A kept outcome in which each line says whether it is one of ``lines``, those of the program that is compiled, and no path is one of
    another program's modules."""

    def owned(items: tuple) -> tuple:
        return tuple(map(own, items))

    def own(item: Any) -> Any:
        source = item.source
        elsewhere = bool(source.file) and (source.file, source.line) not in lines
        changed: dict[str, Any] = {} if elsewhere is source.elsewhere else {"source": dataclasses.replace(source, elsewhere=elsewhere)}
        if getattr(item, "module", "") not in known:
            changed["module"] = ""
        return dataclasses.replace(item, **changed) if changed else item  # most of thousands of nodes stay as they are

    known = {"", *modules}

    code = outcome.code
    if code is not None:
        code = dataclasses.replace(code, nodes_before=owned(code.nodes_before), nodes_after=owned(code.nodes_after))
    return dataclasses.replace(
        outcome,
        substitutions=owned(outcome.substitutions),
        rejections=owned(outcome.rejections),
        verdicts=owned(outcome.verdicts),
        code=code,
    )


def _log_kept(outcome: GraphOutcome) -> None:
    """What was logged when the code was compiled, for those who compile it from a cache."""
    for s in outcome.substitutions:
        log.info("%s in %s at %s: %s (code from Inductor's cache)", s.pattern, s.graph, s.source, s.note or " ".join(s.replacement))
    for r in outcome.rejections:
        log.debug("%s in %s left to Inductor at %s (%s): %s (code from Inductor's cache)", r.pattern, r.graph, r.source, r.node, r.reason)


def _is_opaque(value: Any) -> bool:
    """A tensor subclass that reaches the compiled code as it is, where torch's first-call check refuses any custom operator."""
    if isinstance(value, torch.nn.Parameter):
        value = value.data
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return isinstance(value, torch.Tensor) and type(value) not in plain and not is_traceable_wrapper_subclass(value)
