"""Whether Inductor will run the convolutions of a graph channels last, whatever the strides in the graph say (its layout optimisation).

It decides for all of a graph's convolutions together, among other things by how many of its nodes they are. A replacement takes a
convolution away: where few others are left, those would run in another order than without us, with copies around each.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import fx_utils as g
from fusebackend.log import log

aten = torch.ops.aten

# On CPUs Inductor runs convolutions channels last anyway.
_DEVICES = ("cuda",)

# From so many nodes a convolution on Inductor leaves them as they are: what stands between them takes the time.
_MANY_NODES = 300

# By graph: how many convolutions it had, and the answer. Inductor looks at each of them.
_answers: weakref.WeakKeyDictionary[fx.Graph, tuple[int, bool | None]] = weakref.WeakKeyDictionary()


def is_channels_last_optimised(graph: fx.Graph) -> bool | None:
    """Whether Inductor will run the 2-D convolutions of ``graph`` channels last; None where it can't be asked, and where it decides
    otherwise for inference than for training and the graph does not tell which it is."""
    convolutions = len(_convolutions(graph))
    known = _answers.get(graph)
    if known is None or known[0] != convolutions:
        known = _answers[graph] = (convolutions, _ask(list(graph.nodes), g.is_inference(graph)))
    return known[1]


def deciding_first(inner_compile: Callable, prefers_channels_last: Callable[[Sequence[fx.Node]], bool] | None = None) -> Callable:
    """Inductor's ``compile_fx_inner``, or what takes its place, with the layout that Inductor chooses for the graph as it is given: what is
    replaced meanwhile changes nothing for the convolutions that are left.

    Args:
        prefers_channels_last: whether a graph's convolutions, which are given, should run channels last though Inductor chose otherwise.
    """

    @functools.wraps(inner_compile)
    def compile_as_decided(gm: fx.GraphModule, example_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        is_inference = bool(kwargs.get("is_inference"))
        decided = _decision_to_keep(gm, is_inference)
        if prefers_channels_last is not None and kwargs.get("layout_opt") is None:  # a frozen graph comes with an answer
            open_ones = _that_could_run_channels_last(gm, is_inference)
            decided = True if open_ones and prefers_channels_last(open_ones) else decided
        settings = {} if decided is None else {"layout_optimization": decided, "force_layout_optimization": decided}
        with inductor_config.patch(settings):
            return inner_compile(gm, example_inputs, *args, **kwargs)

    return compile_as_decided


def _decision_to_keep(gm: fx.GraphModule, is_inference: bool) -> bool | None:
    """What Inductor decides for a graph of whose convolutions some may be replaced; None where nothing is to be kept."""
    try:
        if not any(map(_is_depthwise, _convolutions(gm.graph))) or _has_convolving_subgraphs(gm):
            return None
    except Exception as error:  # of a graph without values, which is Inductor's to refuse
        log.debug("nothing is known of a graph's convolutions: %s", error)
        return None
    return _decision(list(gm.graph.nodes), is_inference=is_inference)


def _that_could_run_channels_last(gm: fx.GraphModule, is_inference: bool) -> list[fx.Node]:
    """The convolutions of a forward that Inductor could run channels last, and won't by its rule; none where the user chose. Depthwise ones
    are no slower channels last, by cuDNN or as they are replaced, and are left out."""
    if not inductor_config.layout_optimization or inductor_config.force_layout_optimization:
        return []
    try:
        convolutions = _convolutions(gm.graph)
        if not convolutions or _MANY_NODES * len(convolutions) <= len(gm.graph.nodes) or not _is_forward_alone(gm, convolutions):
            return []
        if not all(map(_gives_planes, convolutions)) or _decision(list(gm.graph.nodes), is_inference=is_inference) is not False:
            return []
        return [n for n in convolutions if not _is_depthwise(n) or g.arguments(n)["groups"] == 1 or g.arguments(n)["transposed"]]
    except Exception as error:  # of a graph without values, which is Inductor's to refuse
        log.debug("nothing is known of a graph's convolutions: %s", error)
        return []


def _is_forward_alone(gm: fx.GraphModule, convolutions: Sequence[fx.Node]) -> bool:
    """Whether what reads the convolutions' results follows in the order in which they run: not the gradients of those that are computed
    anew in the backward, for which Inductor decides again, nor control flow, which is compiled for the strides in the graph."""
    has_gradients = g.is_joint(gm.graph) or gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    has_subgraphs = any(isinstance(m, fx.GraphModule) for m in gm.modules() if m is not gm)
    return not has_gradients and not has_subgraphs and not any(n.meta.get("recompute") for n in convolutions)


def _gives_planes(node: fx.Node) -> bool:
    """Whether a convolution is two-dimensional, on a GPU, of sizes that are known, at least as they are now, and gives planes: of a model
    that lies channels last it does not."""
    tensors = [g.value(g.arguments(node)["input"]), g.value(g.arguments(node)["weight"]), g.value(node)]
    if any(t.dim() != 4 or t.device.type not in _DEVICES or g.hints(t.shape) is None for t in tensors):
        return False
    sizes, strides = g.hints(tensors[-1].shape), g.hints(tensors[-1].stride())
    return sizes is not None and strides is not None and torch.empty_strided(sizes, strides, device="meta").is_contiguous()


def _has_convolving_subgraphs(gm: fx.GraphModule) -> bool:
    """Whether subgraphs have convolutions: they decide by themselves, and a setting would be theirs too."""
    return any(_convolutions(m.graph) for m in gm.modules() if m is not gm and isinstance(m, fx.GraphModule))


def depends_on(nodes: Collection[fx.Node]) -> bool:
    """Whether Inductor would lay out the other convolutions of the graph otherwise without those among ``nodes``."""
    graph = next(iter(nodes)).graph
    taken = {n for n in nodes if n.target is aten.convolution.default}
    if not taken or len(taken) == len(_convolutions(graph)):
        return False
    now = is_channels_last_optimised(graph)
    return now is not None and _ask([n for n in graph.nodes if n not in taken], g.is_inference(graph)) not in (now, None)


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


def _convolutions(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.convolution.default))


def _is_depthwise(node: fx.Node) -> bool:
    args = g.arguments(node)
    return g.same_size(args["groups"], g.value(args["input"]).shape[1])


def _ask(nodes: list[fx.Node], inference: bool | None) -> bool | None:
    """What Inductor would decide for a graph of ``nodes``; None where it can't be asked, or ``inference`` is unknown and matters."""
    answers = {_decision(nodes, is_inference=kind) for kind in ((False, True) if inference is None else (inference,))}
    return answers.pop() if len(answers) == 1 else None


def _decision(nodes: list[fx.Node], *, is_inference: bool) -> bool | None:
    try:
        from torch._inductor.graph import GraphLowering  # heavy

        seen: Any = types.SimpleNamespace(graph=types.SimpleNamespace(nodes=nodes))
        return bool(GraphLowering.decide_layout_opt(seen, is_inference=is_inference))
    except Exception as error:
        log.debug("Inductor does not say how it lays out convolutions: %s", error)
        return None
