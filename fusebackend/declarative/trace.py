"""Traces a function through the same compiler stages as a model, up to the pass that looks for patterns.

The stages are Dynamo, AOTAutograd and Inductor's decompositions, with symbolic sizes. The pattern's graph is therefore
normalised in the same way as the graphs that it is looked for in, whatever the version of PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.declarative import wordings
from fusebackend.declarative.replica import replica
from fusebackend.declarative.trace_errors import explained
from fusebackend.rewriting import interpret
from fusebackend.rewriting.pattern import Level


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced function.

    Attributes:
        graph: the ATen graph.
        inputs: the placeholder of each tensor argument, by position; None for one that the function does not use.
        tangents: the placeholders of the gradients of the results (training only).
        outputs: what the function returns, flattened; in training followed by the gradient of each tensor argument, which is None
            for an argument that does not require one.
        forward_outputs: how many of ``outputs`` the function returns.
        conditions: on its symbolic sizes, where the function decides by them: what it traced holds where they do.
        wordings: for each of its other wordings the operators that tell of it (:mod:`fusebackend.declarative.wordings`).
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    forward_outputs: int
    conditions: tuple[Any, ...] = ()
    wordings: tuple[frozenset[Any], ...] = ()

    def without_gradients(self, positions: Container[int]) -> Trace:
        """The trace without the gradients of the arguments at ``positions``, as of a program that does not ask for them."""
        first = self.forward_outputs
        return self._with([None if i >= first and i - first in positions else o for i, o in enumerate(self.outputs)], first)

    def without_outputs(self, positions: Container[int]) -> Trace:
        """The trace without the results at ``positions``."""
        kept = [o for i, o in enumerate(self.outputs) if i not in positions]
        return self._with(kept, self.forward_outputs - (len(self.outputs) - len(kept)))

    def _with(self, outputs: Sequence[fx.Node | None], forward_outputs: int) -> Trace:
        clone = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        clone.graph_copy(self.graph, copies)
        for old, new in copies.items():
            new.meta = dict(old.meta)

        def copied(nodes: Iterable[fx.Node | None]) -> tuple[fx.Node | None, ...]:
            return tuple(copies[n] if n is not None else None for n in nodes)

        clone.output(list(copied(outputs)))
        clone.eliminate_dead_code()
        inputs, tangents = copied(self.inputs), tuple(copies[n] for n in self.tangents)
        return Trace(clone, inputs, tangents, copied(outputs), forward_outputs, self.conditions, self.wordings)


class _TracedError(Exception):
    """Ends a call whose graph has been captured."""


class TraceError(ValueError):
    """The function can't be traced as a pattern. The message says why."""


@contextlib.contextmanager
def outside_of_compiles() -> Iterator[None]:
    """Operators on real tensors do within what they do in eager mode, whichever graph is being compiled around it."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        yield


def trace(fn: Callable, tensors: Sequence[torch.Tensor], level: Level, wording: int = 0) -> Trace:
    """Traces ``fn(*tensors)`` with symbolic sizes, except sizes of 0 and 1, which are constants.

    If a tensor requires grad, forward and backward are traced together, which needs ``level="joint"``. No operator is run: what it gives
    is what its fake says. May be called while another graph is compiled.

    Args:
        wording: which of the function's wordings is traced; 0 is its own.

    Raises:
        TraceError: a graph break, a tensor that is not an argument, no tensor operation, or an error of the compiler.
    """
    training = any(t.requires_grad for t in tensors)
    if training and level != "joint":
        raise TraceError("example inputs that require grad need level='joint': forward and backward are matched together")
    captured: list[fx.Graph] = []
    positions: list[int] = []  # of each of Dynamo's inputs among the tensors; -1 for a symbolic size
    other_wordings: tuple[frozenset[Any], ...] = ()

    def capture(graph: fx.Graph) -> None:
        if not captured:
            clone = fx.Graph()
            clone.output(clone.graph_copy(graph, {}))
            for old, new in zip(graph.nodes, clone.nodes):
                new.meta = dict(old.meta)
            captured.append(clone)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        nonlocal other_wordings
        if positions:
            raise TraceError("the function has a graph break; a pattern must be one graph")
        for node in gm.graph.find_nodes(op="placeholder"):
            found = re.fullmatch(r"L_tensors_(\d+)_", str(node.target))
            if not found and isinstance(node.meta.get("example_value"), torch.Tensor):
                raise TraceError(f"the function uses a tensor that is not one of its arguments ({node.target}); pass it as one")
            positions.append(int(found[1]) if found else -1)
        other_wordings = wordings.signs(gm.graph)
        if wording:
            wordings.reword(gm, wording)
        slot = "joint_custom_pre_pass" if level == "joint" else "post_grad_custom_post_pass"
        inductor.compile_fx(gm, example_inputs, inner_compile=interpret.inner_compile, config_patches={**interpret.PATCHES, slot: capture})
        return stop

    def stop(*_: Any) -> Any:
        raise _TracedError  # instead of running an operator that may have no kernel for this machine

    def call(*tensors: torch.Tensor) -> Any:
        return fn(*tensors)

    with (
        outside_of_compiles(),
        compile_lock,  # before torch 2.13 a configuration is that of all threads, also of one that compiles
        torch._dynamo.config.patch(suppress_errors=False, specialize_float=True, specialize_int=True),
        # An operator that launches Triton kernels stays one node, which says by its name what it is.
        functorch_config.patch(force_non_lazy_backward_lowering=True, decompose_custom_triton_ops=False),
        inductor_config.patch({"joint_custom_pre_pass": None, "post_grad_custom_post_pass": None}),
        torch.set_grad_enabled(training),
    ):
        try:
            torch.compile(call, backend=backend, dynamic=True, fullgraph=True)(*map(replica, tensors))
        except _TracedError:
            pass
        except Exception as error:
            inner = getattr(error, "inner_exception", None)  # Dynamo wraps the exceptions of a backend
            if isinstance(inner, TraceError):
                raise inner from None
            raise TraceError(f"{getattr(fn, '__name__', fn)} can't be traced: {explained(error)}") from error
        finally:
            torch._dynamo.reset_code(call.__code__)
    if not captured:
        raise TraceError("the function has no tensor operation")
    written = next((n for n in captured[0].nodes if g.is_mutating(n)), None)
    if written is not None:
        raise TraceError(
            f"{getattr(fn, '__name__', fn)} writes to its arguments ({g.describe(written)}); a pattern may only return new tensors"
        )
    return dataclasses.replace(_trace_of(captured[0], positions, len(tensors)), wordings=other_wordings)


def _trace_of(graph: fx.Graph, positions: list[int], count: int) -> Trace:
    placeholders = graph.find_nodes(op="placeholder")
    tangents = tuple(n for n in placeholders if n.name.startswith("tangents"))
    primals = [n for n in placeholders if n not in tangents]
    inputs = tuple(next((n for n, i in zip(primals, positions) if i == k), None) for k in range(count))
    (results,) = graph.output_node().args
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    if any(isinstance(r, fx.Node) and not g.is_tensor(r) for r in results):
        raise TraceError("the function returns a size; a pattern returns tensors")
    conditions = _branches(primals)
    if not tangents:
        return Trace(graph, inputs, (), tuple(results), len(results), conditions)
    # A joint graph returns the function's results, then a gradient for each primal, in the order of the primals.
    forward_outputs = len(results) - len(primals)
    gradients = dict(zip(primals, results[forward_outputs:]))
    outputs = [*results[:forward_outputs], *(gradients.get(n) if n is not None else None for n in inputs)]
    return Trace(graph, inputs, tangents, tuple(outputs), forward_outputs, conditions)


def _branches(primals: Sequence[fx.Node]) -> tuple[Any, ...]:
    """What the function asked about its sizes and went on by. Guards of operators' fakes are not among them: a match compares what they
    decide."""
    sizes = (size for n in primals if g.is_tensor(n) for size in g.value(n).shape if isinstance(size, torch.SymInt))
    size = next(sizes, None)
    if size is None:
        return ()
    env, dynamo = size.node.shape_env, f"{os.sep}_dynamo{os.sep}"
    asked = (env.replace(guard.expr) for guard in env.guards if dynamo in str(guard.sloc.framework_loc))
    return tuple(dict.fromkeys(condition for condition in asked if condition is not sympy.true))


def same_but_for_numbers(a: Trace, numbers_of_a: Mapping[Any, str], b: Trace, numbers_of_b: Mapping[Any, str]) -> bool:
    """Whether two traces of one function are the same but for its number arguments: where the one holds one of its ``numbers``, the other
    holds its own number of that name."""
    places = [{n: i for i, n in enumerate(t.graph.nodes)} for t in (a, b)]

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            return places[0][x] == places[1][y]
        if type(x) in (int, float) and type(y) in (int, float):
            name = numbers_of_a.get(x)
            return numbers_of_b.get(y) == name if name is not None else type(x) is type(y) and (x == y or x != x and y != y)
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            return len(x) == len(y) and all(map(same, x, y))
        return type(x) is type(y) and x == y

    if len(places[0]) != len(places[1]):
        return False
    for x, y in zip(a.graph.nodes, b.graph.nodes):
        if (x.op, x.target if x.op == "call_function" else "") != (y.op, y.target if y.op == "call_function" else ""):
            return False
        if not same(x.args, y.args) or x.kwargs.keys() != y.kwargs.keys() or not all(same(x.kwargs[k], y.kwargs[k]) for k in x.kwargs):
            return False
    return True
