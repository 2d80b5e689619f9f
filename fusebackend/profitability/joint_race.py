"""``fuse.gate="race"`` for what is substituted before the partitioner, while forward and backward are one graph.

A substitution there changes what the forward saves for the backward, so both graphs are compared together, as one step. Both forms go
through the rest of Inductor's passes and the partitioner, are compiled, and run on random inputs. Where the form with the substitutions is
slower, the compile goes on with the form without them. Later substitutions are in neither form: of each graph that comes out
:mod:`fusebackend.profitability.graph_race` keeps the faster form, so what is kept is not slower than the graph without any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils import _pytree as pytree

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.profitability import timer
from fusebackend.profitability.compile_apart import compile_apart
from fusebackend.profitability.fresh_inputs import symbols_of
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.measurements import Answer
from fusebackend.profitability.policy import Gate, verdict_of
from fusebackend.profitability.raced_graphs import check_believable, check_raceable, copied, taken_back
from fusebackend.profitability.random_inputs import Samples
from fusebackend.profitability.region import device_of
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.inductor_pass import FusePass, Original
from fusebackend.rewriting.outcome import GraphOutcome, Source

#: A function of a list of inputs.
Compiled = Callable[[list[Any]], Any]


class JointRace:
    """Races the graphs that one pass at the level of joint graphs rewrites.

    Args:
        ours: that pass; it keeps the originals of the graphs that it rewrites.
        without: the Inductor configuration that leaves our passes out.
        patches: the whole configuration for a form that is timed, without our passes.
    """

    def __init__(self, gate: Gate, ours: FusePass, without: dict[str, Any], patches: dict[str, Any]):
        self._gate, self._ours, self._without, self._patches = gate, ours, without, patches

    def partitioner(self, users: CustomPartitionerFn | None) -> CustomPartitionerFn:
        """For Inductor's ``custom_partitioner_fn``: partitions the faster form of a training graph.

        Args:
            users: the user's own, which then partitions both forms.
        """
        return _Partitioner(self, users, self._ours.uuid())

    def partitioned(self, gm: fx.GraphModule, joint_inputs: Any, partition: Callable, arguments: dict[str, Any]) -> tuple:
        """The forward and the backward of the faster form."""
        original = self._original(gm)
        halves = partition(gm, joint_inputs, **arguments)
        if original is None:
            return halves
        visible = list(range(arguments["num_fwd_outputs"]))
        plain_halves = None
        try:
            plain = self._passed(original.copy, skip_invoke_subgraph=True)
            plain_halves = partition(plain, joint_inputs, **arguments)
            both = halves, plain_halves
            forms = [functools.partial(_step, forward, backward, plain.graph, visible, self._patches) for forward, backward in both]
            keeps = self._keeps(original, gm.graph, plain.graph, forms)
        except Exception as error:
            keeps = self._report(original.name, None, Answer(None, self._gate.measurements.why_failed("racing", error)))
        finally:
            self._gate.close()
        return halves if keeps or plain_halves is None else plain_halves

    def inferring(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        """The faster form of a graph of inference, which is not partitioned."""
        original = self._original(gm)
        if original is None:
            return gm
        plain = None
        try:
            plain = self._passed(original.copy, skip_invoke_subgraph=False)
            plain.graph.output_node().meta.update(gm.graph.output_node().meta)
            forms = [functools.partial(compile_apart, copied(each), list(example_inputs), self._patches) for each in (gm, plain)]
            keeps = self._keeps(original, gm.graph, plain.graph, forms)
        except Exception as error:
            keeps = self._report(original.name, None, Answer(None, self._gate.measurements.why_failed("racing", error)))
        finally:
            self._gate.close()
        return gm if keeps or plain is None else plain

    def _original(self, gm: fx.GraphModule) -> Original | None:
        """What our pass kept of this graph; None if it substituted nothing in it."""
        found = next((o for o in self._ours.originals if o.rewritten is gm), None)
        if found is not None:
            self._ours.originals.remove(found)
        return found

    def _passed(self, gm: fx.GraphModule, skip_invoke_subgraph: bool) -> fx.GraphModule:
        """The graph behind Inductor's own passes on joint graphs, which the other form has gone through."""
        devices = {g.value(n).device for n in gm.graph.nodes if g.is_tensor(n)}
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        with inductor_config.patch(self._without):
            return inductor._recursive_joint_graph_passes(gm, skip_invoke_subgraph, device)

    def _keeps(self, original: Original, ours: fx.Graph, plain: fx.Graph, forms: Sequence[Callable[[], Compiled]]) -> bool:
        """Whether the graph with the substitutions is kept, which is reported. ``forms`` compile it, and then the one without."""
        device = device_of([n for n in plain.nodes if n.op != "output"])
        key = self._key(ours, plain, device)
        answer = self._gate.measurements.ask_once(
            key,
            device,
            lambda: self._timed(original.name, ours, plain, device, forms),
            self._gate.budget.why_spent,
            kept=self._gate.measurements.are_identified(self._ours.patterns),
        )
        return self._report(original.name, key, answer)

    def _key(self, ours: fx.Graph, plain: fx.Graph, device: torch.device) -> str:
        texts = []
        for graph in (ours, plain):
            check_raceable(graph, self._ours.patterns)
            inputs = graph.find_nodes(op="placeholder")
            inner = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
            texts.append(cache_keys.graph_text(inputs, inner, _outputs(graph), symbols_of(inputs)))
        compiled_as = ("joint", bool(inductor_config.triton.cudagraphs), self._ours.names)
        return cache_keys.race(self._gate.measurements.measured_with(device, *self._ours.patterns), "\0".join(texts), compiled_as)

    def _timed(
        self, name: str, ours: fx.Graph, plain: fx.Graph, device: torch.device, forms: Sequence[Callable[[], Compiled]]
    ) -> Measurement:
        fakes = [g.value(n) for n in plain.find_nodes(op="placeholder")]
        samples = Samples(plain, fakes, replaced=ours)
        self._gate.budget.show(f"{name}, the whole graph")
        with timer.undisturbed(device):
            # With CUDA graphs the CPU launches nothing, so what launching takes does not count.
            launches = not inductor_config.triton.cudagraphs
            ours_ms, plain_ms = timer.times_ms([form() for form in forms], samples, device, seconds=1.0, launches=launches)
        check_believable(self._ours.outcomes[name], ours_ms, plain_ms)
        subject = f"{name}, {len(plain.nodes)} nodes"
        return Measurement(ours_ms <= plain_ms, ours_ms, plain_ms, "race", subject, cache_keys.machine(device))

    def _report(self, name: str, key: str | None, answer: Answer) -> bool:
        keeps = answer.measurement is None or answer.measurement.kept
        outcome = self._ours.outcomes.get(name, GraphOutcome(name))
        if key is not None:
            self._gate.record.add(key, keeps, True, answer.measurement is not None)
        verdict = verdict_of("", name, Source(), answer, keeps)
        outcome = dataclasses.replace(outcome, verdicts=(*outcome.verdicts, verdict))
        outcome = outcome if keeps else taken_back(outcome, str(answer.measurement))
        self._ours.outcomes[name] = outcome
        self._ours.report_to(outcome)
        return keeps


class _Partitioner(CustomPartitionerFn):
    """Inductor's partitioner, or the user's, of the faster form."""

    def __init__(self, race: JointRace | None, users: CustomPartitionerFn | None, uuid: str | None):
        self._race, self._users, self._uuid = race, users, uuid

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition: Callable = self._users if self._users is not None else min_cut_rematerialization_partition
        if self._race is None:
            return partition(gm, joint_inputs, **kwargs)
        return self._race.partitioned(gm, joint_inputs, partition, kwargs)

    def uuid(self) -> Any | None:
        if self._users is None or self._uuid is None:
            return self._uuid
        users = self._users.uuid()
        return None if users is None else (repr(users), self._uuid)

    def __reduce__(self) -> tuple:  # a part of Inductor's configuration, which is sent to its subprocesses and hashed for its caches
        return _Partitioner, (None, self._users, self._uuid)

    def __deepcopy__(self, memo: dict) -> _Partitioner:
        return self  # a copy of Inductor's configuration must report to the same place


def _step(forward: fx.GraphModule, backward: fx.GraphModule, joint: fx.Graph, visible: Sequence[int], patches: dict[str, Any]) -> Compiled:
    """Forward and backward as one function of the joint graph's inputs.

    Raises:
        Unfit: an input of the one or the other is not known.
    """
    given = {n.name: i for i, n in enumerate(joint.find_nodes(op="placeholder"))}
    results = {n.name: i for i, n in enumerate(_outputs(forward.graph)) if isinstance(n, fx.Node)}
    enters = [_named(n, given) for n in forward.graph.find_nodes(op="placeholder")]
    saved = backward.graph.find_nodes(op="placeholder")
    returns = [(n.name in results, results[n.name] if n.name in results else _named(n, given)) for n in saved]

    strides: list[Any] = []
    fakes = [g.value(n) for n in forward.graph.find_nodes(op="placeholder")]
    run_forward = compile_apart(_with_visible(forward, visible), fakes, patches, output_strides=strides)
    chosen = [strides[at] if from_forward and at < len(strides) else None for from_forward, at in returns]
    fakes = [_restrided(g.value(n), c) for n, c in zip(saved, chosen)]
    every = range(len(_outputs(backward.graph))) if inductor_config.bw_outputs_user_visible else ()
    run_backward = compile_apart(_with_visible(backward, every), fakes, patches, is_backward=True)

    def step(inputs: list[Any]) -> list[Any]:
        results = run_forward([inputs[i] for i in enters])
        arguments = [results[at] if from_forward else inputs[at] for from_forward, at in returns]
        return [*(results[i] for i in visible), *run_backward(arguments)]

    return step


def _named(node: fx.Node, given: dict[str, int]) -> int:
    if node.name not in given:
        raise Unfit(f"{node.name} is an input of neither the joint graph nor the forward")
    return given[node.name]


def _outputs(graph: fx.Graph) -> list[Any]:
    return pytree.arg_tree_leaves(*graph.output_node().args)


def _with_visible(gm: fx.GraphModule, visible: Sequence[int]) -> fx.GraphModule:
    """A copy whose results at these places have the strides that they have in eager mode."""
    module = copied(gm)
    outputs = _outputs(module.graph)
    module.graph.output_node().meta["user_visible_output_idxs"] = [i for i in visible if isinstance(outputs[i], fx.Node)]
    return module


def _restrided(value: Any, strides: Sequence[Any] | None) -> Any:
    """A saved tensor with the strides that the compiled forward gives it."""
    if not isinstance(value, torch.Tensor) or strides is None:
        return value
    real, traced = g.hints(strides), g.hints(value.stride())
    if real is None or real == traced:
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.as_strided(value.shape, strides)
