"""``fuse.gate="race"``: each graph that was rewritten is compiled both ways, and the faster compiled graph is kept.

It comes on top of the regions' measurements and sees what they can't: what a substitution does to the rest of its graph. Substitutions in
joint graphs, before forward and backward are partitioned, are decided by their regions; here both compiled forms have them.
"""

from __future__ import annotations

import copy
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
from fusebackend.profitability.distributed import Answer
from fusebackend.profitability.fresh_inputs import symbols_of
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.policy import Gate, verdict_of
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.region import device_of
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.inductor_pass import FusePass
from fusebackend.rewriting.outcome import GraphCode, GraphOutcome, Rejection, Source, both_times

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")

# A race in which a graph is so many times slower, all of whose substitutions were faster by themselves, is not believed.
_MAX_CONTRADICTION = 3.0


class _NothingToRace(Unfit):
    """The graph has no substitutions."""


def racing(gate: Gate, ours: FusePass, without: dict[str, Any]) -> Callable:
    """Takes the place of Inductor's ``compile_fx_inner``.

    Args:
        ours: our pass on the graphs that this compiles.
        without: the Inductor configuration that leaves it out.
    """

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
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
            answer = self.gate.ask(
                key, lambda: self.timed(device), self.gate.budget.why_spent(), kept=self.gate.are_identified(self.ours.patterns)
            )
        except Exception as error:
            answer = Answer(None, self.gate.why_failed("racing", error))
        substituted = answer.measurement is None or answer.measurement.kept
        result = self.winner(substituted)
        outcome = self.outcome
        if answer.measurement is not None or outcome.substitutions:
            if key is not None:
                self.gate.record.add(key, substituted, True, answer.measurement is not None)
            verdict = verdict_of("", self.name, Source(), answer, substituted)
            outcome = dataclasses.replace(outcome, verdicts=(*outcome.verdicts, verdict))
            self.ours.report_to(outcome if substituted else self.taken_back(outcome, str(answer.measurement)))
        return result

    @property
    def outcome(self) -> GraphOutcome:
        """What our pass did to this graph; nothing where the compiled code came from a cache."""
        return self.ours.outcomes.get(self.name, GraphOutcome(self.name))

    def key(self) -> tuple[str, torch.device]:
        """The key of this graph's measurement, and its device. Unfit: why it is not raced."""
        if V.aot_compilation:
            raise Unfit("ahead-of-time compiles are not raced")
        nodes = list(self.gm.graph.nodes)
        for node in nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES:
                raise Unfit(f"{node.target} needs the other ranks")
            if node.meta.get("unbacked_bindings"):
                raise Unfit(f"the size of {node.name} is not known before run time")
        inputs = [n for n in nodes if n.op == "placeholder"]
        inner = [n for n in nodes if n.op not in ("placeholder", "output")]
        text = cache_keys.graph_text(inputs, inner, list(nodes[-1].args[0]), symbols_of(inputs))
        device = device_of(nodes[:-1])
        compiled_as = (self.cudagraphs, self.kwargs.get("is_backward"), self.kwargs.get("is_inference"), self.ours.names)
        return cache_keys.race(self.gate.measured_with(device, *self.ours.patterns), text, compiled_as), device

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
            replaced_ms, inductor_ms = timer.medians_ms(forms, samples, device, seconds=1.0, launches=not self.cudagraphs)
        self.check(replaced_ms, inductor_ms)
        subject = f"{self.name}, {len(self.gm.graph.nodes)} nodes"
        return Measurement(replaced_ms <= inductor_ms, replaced_ms, inductor_ms, "race", subject, cache_keys.machine(device))

    def check(self, replaced_ms: float, inductor_ms: float) -> None:
        """Unfit: the race contradicts what its regions measured so much that its random inputs must have misled it."""
        applied = [v for v in self.outcome.verdicts if v.applied]
        gained = sum(v.inductor_ms - v.replaced_ms for v in applied if v.replaced_ms is not None and v.inductor_ms is not None)
        if gained > 0 and replaced_ms > _MAX_CONTRADICTION * inductor_ms:
            raise Unfit(f"the whole graph took {both_times(replaced_ms, inductor_ms)}, but its regions gained {gained:.3g} ms")

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
            compiled = inductor.compile_fx_inner(_copy(self.gm), self.example_inputs, **kwargs)
        self.compiled[substituted] = compiled, list(self.strides or ())
        return compiled

    def winner(self, substituted: bool) -> Any:
        if substituted not in self.compiled or self.cudagraphs:
            self.compile(substituted, timing=False)
        compiled, strides = self.compiled[substituted]
        if self.strides is not None:
            self.strides[:] = strides
        return compiled

    def taken_back(self, outcome: GraphOutcome, reason: str) -> GraphOutcome:
        """``outcome`` of a graph that was compiled as it was."""
        rejections = tuple(
            Rejection(s.pattern, s.graph, s.source, f"the graph was {reason}", s.node, "measured_slower", s.module)
            for s in outcome.substitutions
        )
        code = outcome.code
        if code is None:
            code = GraphCode(self.name, "", "", len(self.gm.graph.nodes))
        else:
            code = dataclasses.replace(code, after=code.before, nodes_after=code.nodes_before)
        return dataclasses.replace(outcome, substitutions=(), rejections=(*outcome.rejections, *rejections), code=code)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same tensors. Subgraphs of control flow are copied too, since compiling changes them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    old, new = (next(iter(reversed(x.nodes))) for x in (gm.graph, graph))
    new.meta = copy.copy(old.meta)
    copied = fx.GraphModule(gm, graph)
    for name, module in list(copied.named_children()):
        if isinstance(module, fx.GraphModule):
            setattr(copied, name, copy.deepcopy(module))
    copied.meta = copy.copy(gm.meta)
    return copied
