"""Describes FX nodes and graphs for reports: source lines, shapes, code."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.outcome import GraphNode, Source, Substitution
from fusebackend.rewriting.pattern import Estimate
from fusebackend.rewriting.provenance import input_name, module_of
from fusebackend.rewriting.traffic import moved_bytes, operators

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s+(?P<code>[^\n]*))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def source_of(node: fx.Node) -> Source:
    """The innermost line outside torch of the stack that made ``node``."""
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=1024)  # many nodes share a stack, which takes long to parse
def _innermost(stack: str) -> Source:
    frames = [m.groupdict() for m in _FRAME.finditer(stack)]
    outside = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not outside:
        return Source()
    frame = outside[-1]
    return Source(frame["file"], int(frame["line"]), frame["function"], (frame["code"] or "").strip())


def lines_of(gm: fx.GraphModule) -> set[tuple[str, int]]:
    """The files and line numbers that the nodes of a graph, and of the graphs in it, come from."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    stacks = {n.meta.get("stack_trace") or "" for graph in graphs for n in graph.nodes}
    return {(m["file"], int(m["line"])) for stack in stacks for m in _FRAME.finditer(stack)}


def substitution(
    pattern: str,
    graph: str,
    nodes: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    new_nodes: Sequence[fx.Node],
    note: str,
    estimate: Estimate | None,
) -> Substitution:
    """Describes a replacement. To be called before the old nodes are removed."""
    ours, inductor = (None, None) if estimate is None else (estimate.ours, estimate.inductor)
    old = sorted(set(nodes))
    inputs, results = _operands(outputs, new_nodes)
    return Substitution(
        pattern=pattern,
        graph=graph,
        source=source_of(outputs[0]),
        replaced=tuple(g.describe(n) for n in old),
        replacement=tuple(g.describe(n) for n in new_nodes if not g.is_view(n)),
        inputs=inputs,
        outputs=results,
        node=outputs[0].name,
        note=note,
        replaced_nodes=tuple(n.name for n in old),
        new_nodes=tuple(n.name for n in new_nodes),
        module=module_of(outputs[0]),
        replaced_operators=len(operators(old)),
        new_operators=len(operators(new_nodes)),
        replaced_bytes=moved_bytes(old),
        new_bytes=moved_bytes(new_nodes),
        inductor_us=None if inductor is None else inductor.expected,
        estimated_us=None if ours is None else ours.expected,
    )


def shapes(outputs: Sequence[fx.Node], new_nodes: Sequence[fx.Node]) -> str:
    """``f32[8, 4] -> f32[4, 8]``: what a replacement reads and computes."""
    inputs, results = _operands(outputs, new_nodes)
    return f"{', '.join(inputs)} -> {', '.join(results)}"


def _operands(outputs: Sequence[fx.Node], new_nodes: Sequence[fx.Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inputs = dict.fromkeys(i for n in new_nodes for i in n.all_input_nodes if i not in new_nodes)
    return tuple(g.spec(g.value(n)) for n in inputs if g.is_tensor(n)), tuple(g.spec(g.value(n)) for n in outputs)


def graph_nodes(graph: fx.Graph, known: tuple[GraphNode, ...] = (), inputs_called: tuple[str, ...] = ()) -> tuple[GraphNode, ...]:
    """The graph's nodes in order.

    Args:
        inputs_called: the user's names of the inputs of Dynamo's graph.
        known: the nodes of the graph before it was rewritten, most of which are unchanged.
    """
    before = {n.name: n for n in known}
    found = []
    for node in graph.nodes:
        inputs = tuple([i.name for i in node.all_input_nodes])
        old = before.get(node.name)
        if old is not None and old.inputs == inputs:
            found.append(old)
            continue
        target = g.describe(node) if node.op == "call_function" else node.op
        spec = _spec(g.value(node)) if node.op != "output" else ""
        label = input_name(node, inputs_called) if node.op == "placeholder" else ""
        found.append(GraphNode(node.name, target, inputs, spec, source_of(node), label))
    return tuple(found)


def _spec(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_spec, value))
    return "" if value is None else g.spec(value)
