"""Whether Inductor will run the convolutions of a graph channels last, whatever the strides in the graph say (its layout optimisation)."""

from __future__ import annotations

import weakref

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.log import log

aten = torch.ops.aten

# By graph: how many convolutions it had, and the answer. Inductor looks at each of them.
_answers: weakref.WeakKeyDictionary[fx.Graph, tuple[int, bool | None]] = weakref.WeakKeyDictionary()


def is_channels_last_optimised(graph: fx.Graph) -> bool | None:
    """Whether Inductor will run the 2-D convolutions of ``graph`` channels last; None where it can't be asked, and where it decides
    otherwise for inference than for training and the graph does not tell which it is."""
    convolutions = len(graph.find_nodes(op="call_function", target=aten.convolution.default))
    known = _answers.get(graph)
    if known is None or known[0] != convolutions:
        known = _answers[graph] = (convolutions, _ask(graph))
    return known[1]


def is_given(node: fx.Node) -> bool:
    """Whether a tensor, or what it is a view of, is an input of the graph."""
    node = g.through_views(node)
    return node.op in ("placeholder", "get_attr")


def is_followed(node: fx.Node) -> bool:
    """Whether a convolution that is not depthwise stands after ``node``: up to the last one Inductor prefers channels last."""
    for other in reversed(node.graph.nodes):
        if other is node:
            return False
        if other.target is node.target and not _is_depthwise(other):
            return True
    return False


def gives_channels_last(node: fx.Node) -> bool:
    """Whether the result of a convolution will lie channels last though the graph does not say so. An operator in the place of a depthwise
    one keeps the order of what it reads."""
    if is_channels_last_optimised(node.graph) is not True:
        return False
    return not _is_depthwise(node) or (is_followed(node) and not is_given(g.arguments(node)["input"]))


def _is_depthwise(node: fx.Node) -> bool:
    args = g.arguments(node)
    return g.same_size(args["groups"], g.value(args["input"]).shape[1])


def _ask(graph: fx.Graph) -> bool | None:
    try:
        from torch._inductor.graph import GraphLowering  # heavy

        module = graph.owning_module
        assert module is not None
        inference = g.is_inference(graph)
        kinds = (False, True) if inference is None else (inference,)
        answers = {GraphLowering.decide_layout_opt(module, is_inference=kind) for kind in kinds}
    except Exception as error:
        log.debug("Inductor does not say how it lays out convolutions: %s", error)
        return None
    return answers.pop() if len(answers) == 1 else None
