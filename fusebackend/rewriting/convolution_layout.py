"""Whether Inductor will run the convolutions of a graph channels last, whatever the strides in the graph say (its layout optimisation)."""

from __future__ import annotations

import weakref

import torch
from torch import fx

from fusebackend.log import log

aten = torch.ops.aten

# By graph: how many convolutions it had, and the answer. Inductor looks at each of them.
_answers: weakref.WeakKeyDictionary[fx.Graph, tuple[int, bool | None]] = weakref.WeakKeyDictionary()


def is_channels_last_optimised(graph: fx.Graph) -> bool | None:
    """Whether Inductor will run the 2-D convolutions of ``graph`` channels last. It decides otherwise for inference than for training; None
    where that matters, and where it can't be asked."""
    convolutions = len(graph.find_nodes(op="call_function", target=aten.convolution.default))
    known = _answers.get(graph)
    if known is None or known[0] != convolutions:
        known = _answers[graph] = (convolutions, _ask(graph))
    return known[1]


def _ask(graph: fx.Graph) -> bool | None:
    try:
        from torch._inductor.graph import GraphLowering  # heavy

        module = graph.owning_module
        assert module is not None
        answers = {GraphLowering.decide_layout_opt(module, is_inference=inference) for inference in (False, True)}
    except Exception as error:
        log.debug("Inductor does not say how it lays out convolutions: %s", error)
        return None
    return answers.pop() if len(answers) == 1 else None
