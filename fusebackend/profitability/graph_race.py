"""``fuse.gate="race"``: each graph that was rewritten is compiled both ways, and the faster compiled graph is kept.

It comes on top of the regions' timings and sees what they can't: what a substitution does to the rest of its graph.
Substitutions in joint graphs, before forward and backward are parted, are settled by their regions; here both compiled
forms have them.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.utils import BoxedBool, get_donated_idxs
from torch._inductor.virtualized import V

from fusebackend.profitability.policy import Gate, machine
from fusebackend.profitability.random_inputs import Samples, Unfit
from fusebackend.profitability.region import describe, device_of, symbols_of
from fusebackend.profitability.timer import medians_ms, undisturbed
from fusebackend.profitability.verdict_store import Verdict
from fusebackend.profitability.verdict_store import times as times_of
from fusebackend.report import model as report
from fusebackend.rewriting.inductor_pass import FusePass

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")


_INCREDIBLE = 3.0  # a graph so many times slower, all of whose substitutions were faster by themselves


class _Nothing(Unfit):
    """There is nothing to race: the graph has no substitutions."""


def racing(gate: Gate, own: FusePass, without: dict[str, Any]) -> Callable:
    """What stands in for Inductor's ``compile_fx_inner``.

    Args:
        own: our pass on the graphs that this compiles.
        without: the Inductor configuration that leaves it out.
    """

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        race = _Race(gate, own, without, gm, example_inputs, kwargs)
        try:
            return race.run()
        finally:
            gate.close()
            own.done()

    return inner_compile


class _Race:
    def __init__(self, gate: Gate, own: FusePass, without: dict, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict):
        self.gate, self.own, self.without = gate, own, without
        self.gm, self.example_inputs, self.kwargs = gm, example_inputs, kwargs
        self.seen = dict(own.seen)
        self.name = own.graph_name(gm.graph)
        self.cudagraphs = bool(kwargs.get("cudagraphs"))
        self.strides = getattr(TracingContext.try_get(), "output_strides", None)
        self.compiled: dict[bool, tuple[Any, list]] = {}

    def run(self) -> Any:
        verdict = key = None
        try:
            key, device = self.key()
            verdict, why = self.gate.decide(key, lambda: self.timed(device), self.gate.within_budget())
        except Exception as error:
            why = self.gate.fault("racing", error)
        ours = verdict is None or verdict.kept
        result = self.winner(ours)
        substituted = [s for s in self.own.result.substitutions if s.graph == self.name]
        if verdict is not None or substituted:
            source = report.Source()
            self.gate.note(report.Verdict.of("", self.name, source, verdict, ours, why))
            if key is not None:
                self.gate.record.add(key, ours, True, verdict is not None)
        if not ours:
            self.take_back(str(verdict), substituted)
        return result

    def key(self) -> tuple[str, torch.device]:
        """The name of this graph's verdict, and its device. Unfit: why it is not raced."""
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
        text = describe(inputs, inner, list(nodes[-1].args[0]), symbols_of(inputs))
        device = device_of(nodes[:-1])
        kind = (self.cudagraphs, self.kwargs.get("is_backward"), self.kwargs.get("is_inference"), self.own.names)
        salt = self.gate.salt(device, *self.own.patterns)
        return hashlib.sha256(f"race\0{salt}\0{kind}\0{text}".encode()).hexdigest()[:32], device

    def timed(self, device: torch.device) -> Verdict:
        """Compiles both ways and times them, on inputs of their own."""
        began = time.perf_counter()
        samples = None
        try:
            samples = Samples(self.gm.graph, self.example_inputs)
        finally:  # compiled in any case; that much time is not the race's
            ours = self.compile(True, timing=True)
            self.gate.spent -= time.perf_counter() - began
        if not any(s.graph == self.name for s in self.own.result.substitutions):
            raise _Nothing("nothing was substituted")
        if self.kwargs.get("is_backward"):  # saved tensors whose memory Inductor uses for its own results
            samples.mutated = sorted({*samples.mutated, *(get_donated_idxs() or ())})
        self.gate.progress(f"{self.name}, the whole graph")
        ways = [ours, self.compile(False, timing=True)]
        with undisturbed(device):
            # With CUDA graphs the CPU launches nothing, so what launching takes does not count.
            times = medians_ms(ways, samples, device, seconds=1.0, launches=not self.cudagraphs)
        self.check(times)
        return Verdict(times[0] <= times[1], *times, "race", f"{self.name}, {len(self.gm.graph.nodes)} nodes", machine(device))

    def check(self, times: list[float]) -> None:
        """Unfit: the race contradicts what its regions measured so much that its random inputs must have misled it."""
        regions = [v for v in self.own.result.verdicts if v.graph == self.name and v.applied and v.replaced_ms is not None]
        gained = sum(v.inductor_ms - v.replaced_ms for v in regions)
        if gained > 0 and times[0] > _INCREDIBLE * times[1]:
            raise Unfit(f"the whole graph took {times_of(*times)}, but its regions gained {gained:.3g} ms")

    def compile(self, ours: bool, timing: bool) -> Any:
        """Compiles a copy of the graph with our pass or without.

        For timing never as a CUDA graph: recording one would disturb those that are live.
        """
        kwargs = dict(self.kwargs)
        patches = {} if ours else dict(self.without)
        if timing and self.cudagraphs:
            kwargs["cudagraphs"] = BoxedBool(False)
            patches["triton.cudagraphs"] = False
        if ours:
            self.own.seen = dict(self.seen)  # the pass gives the graph the same name again
        if self.strides is not None:
            self.strides.clear()
        with inductor_config.patch(patches):
            compiled = inductor.compile_fx_inner(_copy(self.gm), self.example_inputs, **kwargs)
        self.compiled[ours] = compiled, list(self.strides or ())
        return compiled

    def winner(self, ours: bool) -> Any:
        if ours not in self.compiled or self.cudagraphs:
            self.compile(ours, timing=False)
        compiled, strides = self.compiled[ours]
        if self.strides is not None:
            self.strides[:] = strides
        return compiled

    def take_back(self, reason: str, substituted: list[report.Substitution]) -> None:
        """Corrects the report: the graph is as it was."""
        result = self.own.result
        result.substitutions = [s for s in result.substitutions if s.graph != self.name]
        result.rejections += [report.Rejection(s.pattern, s.graph, s.source, f"the graph was {reason}", s.node) for s in substituted]
        drawn = next((c for c in result.graphs if c.name == self.name), None)
        if drawn is None:
            result.graphs.append(report.GraphCode(self.name, "", "", len(self.gm.graph.nodes)))
        else:
            plain = dataclasses.replace(drawn, after=drawn.before, nodes_after=drawn.nodes_before)
            result.graphs[result.graphs.index(drawn)] = plain


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same tensors; what control flow calls is copied too, since compiling changes it."""
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
