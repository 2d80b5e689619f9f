"""``fuse.gate="race"``: each graph that was rewritten is compiled both ways, and the faster compiled graph is kept.

It comes on top of the regions' measurements and sees what they can't: what a substitution does to the rest of its graph. Substitutions in
joint graphs, before forward and backward are partitioned, have been raced then (:mod:`fusebackend.profitability.joint_race`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.utils import BoxedBool, get_donated_idxs
from torch._inductor.virtualized import V

from fusebackend import cache_keys
from fusebackend.profitability import timer
from fusebackend.profitability.fresh_inputs import symbols_of
from fusebackend.profitability.joint_race import JointRace
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.measurements import Answer
from fusebackend.profitability.policy import Gate, verdict_of
from fusebackend.profitability.raced_graphs import check_believable, check_raceable, copied, taken_back
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.region import device_of
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.inductor_pass import FusePass
from fusebackend.rewriting.outcome import GraphOutcome, Source


class _NothingToRace(Unfit):
    """The graph has no substitutions."""


def racing(gate: Gate, ours: FusePass, without: dict[str, Any], joint: JointRace | None = None) -> Callable:
    """Takes the place of Inductor's ``compile_fx_inner``.

    Args:
        ours: our pass on the graphs that this compiles.
        without: the Inductor configuration that leaves it out.
        joint: races what was substituted before, where no partitioner does; None where nothing is.
    """

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if joint is not None and kwargs.get("is_inference"):
            gm = joint.inferring(gm, example_inputs)
        try:
            return _Race(gate, ours, without, gm, example_inputs, kwargs).run()
        finally:
            gate.close()

    return inner_compile


class _Race:
    def __init__(self, gate: Gate, ours: FusePass, without: dict, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict):
        self.gate, self.ours, self.without = gate, ours, without
        self.gm, self.example_inputs, self.kwargs = gm, example_inputs, kwargs
        self.seen = dict(ours.seen)
        self.name = ours.graph_name(gm.graph)
        self.cudagraphs = bool(kwargs.get("cudagraphs"))
        self.strides = getattr(TracingContext.try_get(), "output_strides", None)
        self.compiled: dict[bool, tuple[Any, list]] = {}

    def run(self) -> Any:
        key = None
        try:
            key, device = self.key()
            known = self.gate.measurements
            kept = known.are_identified(self.ours.patterns)
            answer = known.ask_once(key, device, lambda: self.timed(device), self.gate.budget.why_spent, kept=kept)
        except Exception as error:
            answer = Answer(None, self.gate.measurements.why_failed("racing", error))
        substituted = answer.measurement is None or answer.measurement.kept
        result = self.winner(substituted)
        outcome = self.outcome
        if answer.measurement is not None or outcome.substitutions:
            if key is not None:
                self.gate.record.add(key, substituted, True, answer.measurement is not None)
            verdict = verdict_of("", self.name, Source(), answer, substituted)
            outcome = dataclasses.replace(outcome, verdicts=(*outcome.verdicts, verdict))
            self.ours.report_to(outcome if substituted else taken_back(outcome, str(answer.measurement), len(self.gm.graph.nodes)))
        return result

    @property
    def outcome(self) -> GraphOutcome:
        """What our pass did to this graph; nothing where the compiled code came from a cache."""
        return self.ours.outcomes.get(self.name, GraphOutcome(self.name))

    def key(self) -> tuple[str, torch.device]:
        """The key of this graph's measurement, and its device. Unfit: why it is not raced."""
        if V.aot_compilation:
            raise Unfit("ahead-of-time compiles are not raced")
        check_raceable(self.gm.graph, self.ours.patterns)
        nodes = list(self.gm.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        inner = [n for n in nodes if n.op not in ("placeholder", "output")]
        text = cache_keys.graph_text(inputs, inner, list(nodes[-1].args[0]), symbols_of(inputs))
        device = device_of(nodes[:-1])
        compiled_as = (self.cudagraphs, self.kwargs.get("is_backward"), self.kwargs.get("is_inference"), self.ours.names)
        return cache_keys.race(self.gate.measurements.measured_with(device, *self.ours.patterns), text, compiled_as), device

    def timed(self, device: torch.device) -> Measurement:
        """Compiles both ways and times them on random inputs."""
        with self.gate.budget.not_spending():  # with our pass the graph is compiled in any case
            try:
                samples = Samples(self.gm.graph, self.example_inputs)
            finally:
                ours = self.compile(True, timing=True)
        if not self.outcome.substitutions:
            raise _NothingToRace("nothing was substituted")
        if self.kwargs.get("is_backward"):  # saved tensors whose memory Inductor uses for its results
            samples.mutated = sorted({*samples.mutated, *(get_donated_idxs() or ())})
        self.gate.budget.show(f"{self.name}, the whole graph")
        forms = [ours, self.compile(False, timing=True)]
        with timer.undisturbed(device):
            # With CUDA graphs the CPU launches nothing, so what launching takes does not count.
            replaced_ms, inductor_ms = timer.times_ms(forms, samples, device, seconds=1.0, launches=not self.cudagraphs)
        check_believable(self.outcome, replaced_ms, inductor_ms)
        subject = f"{self.name}, {len(self.gm.graph.nodes)} nodes"
        return Measurement(replaced_ms <= inductor_ms, replaced_ms, inductor_ms, "race", subject, cache_keys.machine(device))

    def compile(self, substituted: bool, timing: bool) -> Any:
        """Compiles a copy of the graph with our pass or without.

        For timing never as a CUDA graph: recording one would disturb those that are live.
        """
        kwargs = dict(self.kwargs)
        patches = {} if substituted else dict(self.without)
        if timing and self.cudagraphs:
            kwargs["cudagraphs"] = BoxedBool(False)
            patches["triton.cudagraphs"] = False
        if substituted:
            self.ours.seen = dict(self.seen)  # the pass gives the graph the same name again
        if self.strides is not None:
            self.strides.clear()
        with inductor_config.patch(patches):
            compiled = inductor.compile_fx_inner(copied(self.gm), self.example_inputs, **kwargs)
        self.compiled[substituted] = compiled, list(self.strides or ())
        return compiled

    def winner(self, substituted: bool) -> Any:
        if substituted not in self.compiled or self.cudagraphs:
            self.compile(substituted, timing=False)
        compiled, strides = self.compiled[substituted]
        if self.strides is not None:
            self.strides[:] = strides
        return compiled
