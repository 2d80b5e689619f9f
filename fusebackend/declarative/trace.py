"""Traces a function down the same road that a model travels, up to the point where patterns are looked for.

The function goes through Dynamo, AOTAutograd and Inductor's decompositions with symbolic sizes, and the graph is taken
where our pass would see it. So what is searched for and what is searched in agree by construction, in every version.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config

from fusebackend.rewriting import interpret
from fusebackend.rewriting.pattern import Level


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced function.

    Attributes:
        graph: the ATen graph.
        inputs: the placeholder of each tensor argument, by position; None for one that the function does not use.
        tangents: the placeholders of the gradients that come in (training only).
        outputs: what the function returns, flattened, then in training the gradient of each tensor argument that needs
            one (None for the others).
        forward_outputs: how many of ``outputs`` are the function's own.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    forward_outputs: int


class TraceError(ValueError):
    """The function can't be traced as a pattern; the message says why."""


def trace(fn: Callable, tensors: Sequence[torch.Tensor], level: Level) -> Trace:
    """Traces ``fn(*tensors)`` with symbolic sizes (sizes of 0 and 1 stay as they are).

    If a tensor requires grad, forward and backward are traced together, which needs ``level="joint"``.

    Raises:
        TraceError: a graph break, an unused result, a mutation, or no tensor operation at all.
    """
    training = any(t.requires_grad for t in tensors)
    if training and level != "joint":
        raise TraceError("example inputs that require grad need level='joint': forward and backward are matched together")
    captured: list[fx.Graph] = []
    order: list[int] = []

    def take(graph: fx.Graph) -> None:
        if not captured:
            clone = fx.Graph()
            clone.output(clone.graph_copy(graph, {}))
            for old, new in zip(graph.nodes, clone.nodes):
                new.meta = dict(old.meta)
            captured.append(clone)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        if order:
            raise TraceError("the function has a graph break; a pattern must be one graph")
        for node in gm.graph.find_nodes(op="placeholder"):
            found = re.fullmatch(r"L_tensors_(\d+)_", str(node.target))
            if not found and isinstance(node.meta.get("example_value"), torch.Tensor):
                raise TraceError(f"the function uses a tensor that is not one of its arguments ({node.target}); pass it as one")
            order.append(int(found[1]) if found else -1)  # -1: a symbolic size
        slot = "joint_custom_pre_pass" if level == "joint" else "post_grad_custom_post_pass"
        return inductor.compile_fx(
            gm, example_inputs, inner_compile=interpret.inner_compile, config_patches={**interpret.PATCHES, slot: take}
        )

    def call(*tensors: torch.Tensor) -> Any:
        return fn(*tensors)

    with (
        torch._dynamo.config.patch(suppress_errors=False, specialize_float=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        inductor_config.patch({"joint_custom_pre_pass": None, "post_grad_custom_post_pass": None}),
        torch.set_grad_enabled(training),
    ):
        try:
            torch.compile(call, backend=backend, dynamic=True, fullgraph=True)(*tensors)
        except Exception as error:
            inner = getattr(error, "inner_exception", None)  # Dynamo wraps what a backend raises
            if isinstance(inner, TraceError):
                raise inner from None
            reason = str(error).strip().split("\n")[0]
            raise TraceError(f"{getattr(fn, '__name__', fn)} can't be traced: {type(error).__name__}: {reason}") from error
        finally:
            torch._dynamo.reset_code(call.__code__)
    if not captured:
        raise TraceError("the function has no tensor operation")
    return _trace_of(captured[0], order, len(tensors))


def _trace_of(graph: fx.Graph, order: list[int], count: int) -> Trace:
    placeholders = graph.find_nodes(op="placeholder")
    tangents = tuple(n for n in placeholders if n.name.startswith("tangents"))
    primals = [n for n in placeholders if n not in tangents]
    positions = dict(zip(primals, order))
    inputs = tuple(next((n for n, i in positions.items() if i == k), None) for k in range(count))
    (results,) = graph.output_node().args
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    if not tangents:
        return Trace(graph, inputs, (), tuple(results), len(results))
    # A joint graph returns the function's results, then a gradient for each primal, in the primals' order.
    own = len(results) - len(primals)
    gradients = dict(zip(primals, results[own:]))
    outputs = [*results[:own], *(gradients.get(n) if n is not None else None for n in inputs)]
    return Trace(graph, inputs, tangents, tuple(outputs), own)
