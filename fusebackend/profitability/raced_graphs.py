"""What races of whole graphs share: which graphs can be raced, copies of them, and what is reported of one that lost."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from fusebackend.native import fallbacks
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.outcome import GraphCode, GraphOutcome, Rejection, both_times
from fusebackend.rewriting.pattern import Pattern

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")

# A race in which a graph is so many times slower, all of whose substitutions were faster by themselves, is not believed.
_MAX_CONTRADICTION = 3.0


def check_raceable(graph: fx.Graph, patterns: Iterable[Pattern]) -> None:
    """Unfit: why the graph can't be run by itself, again and again.

    Args:
        patterns: those of this compile. What they look for is timed in regions, too.
    """
    looked_for = {anchor for pattern in patterns for anchor in pattern.anchors}
    module = graph.owning_module
    subgraphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)] if module is not None else []
    for each in {graph, *subgraphs}:
        for node in each.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES:
                raise Unfit(f"{node.target} needs the other ranks")
            if node.target is torch.ops.higher_order.with_effects:
                raise Unfit(f"{node.args[1]} has effects")
            if node.meta.get("unbacked_bindings"):
                raise Unfit(f"the size of {node.name} is not known before run time")
        for operator in fallbacks.programs_own(each) - looked_for:
            raise Unfit(f"{operator} is the program's own: it may have a state, which more calls would change")


def check_believable(outcome: GraphOutcome, replaced_ms: float, inductor_ms: float) -> None:
    """Unfit: the race contradicts what its regions measured so much that its random inputs must have misled it."""
    applied = [v for v in outcome.verdicts if v.applied]
    gained = sum(v.inductor_ms - v.replaced_ms for v in applied if v.replaced_ms is not None and v.inductor_ms is not None)
    if gained > 0 and replaced_ms > _MAX_CONTRADICTION * inductor_ms:
        raise Unfit(f"the whole graph took {both_times(replaced_ms, inductor_ms)}, but its regions gained {gained:.3g} ms")


def taken_back(outcome: GraphOutcome, reason: str, nodes: int = 0) -> GraphOutcome:
    """The outcome of a graph that was compiled as it was.

    Args:
        nodes: how many it has, where ``outcome`` does not show it.
    """
    rejections = tuple(
        Rejection(s.pattern, s.graph, s.source, f"the graph was {reason}", s.node, "measured_slower", s.module)
        for s in outcome.substitutions
    )
    code = outcome.code
    if code is None:
        code = GraphCode(outcome.graph, "", "", nodes)
    else:
        code = dataclasses.replace(code, after=code.before, nodes_after=code.nodes_before)
    return dataclasses.replace(outcome, substitutions=(), rejections=(*outcome.rejections, *rejections), code=code)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same tensors. Subgraphs of control flow are copied too, since compiling changes them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    old, new = (next(iter(reversed(x.nodes))) for x in (gm.graph, graph))
    new.meta = copy.copy(old.meta)
    new_gm = fx.GraphModule(gm, graph)
    for name, module in list(new_gm.named_children()):
        if isinstance(module, fx.GraphModule):
            setattr(new_gm, name, copy.deepcopy(module))
    new_gm.meta = copy.copy(gm.meta)
    return new_gm
