"""Whether Inductor will choose another memory order for a convolution than the graph has."""

from __future__ import annotations

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.log import log
from fusebackend.patterns.depthwise_conv.ops import is_channels_last


def is_reordered(node: fx.Node) -> bool:
    """Whether the convolution at ``node``, whose operands are planes in the graph, will be given them in channels-last order.

    Inductor decides that of a whole graph, when it lowers it. It is asked here; where it can't be, the answer is yes.
    """
    x = g.value(g.arguments(node)["input"])
    if x.device.type != "cuda" or x.dim() != 4 or is_channels_last(x):
        return False
    try:
        from torch._inductor.graph import GraphLowering  # heavy

        module = node.graph.owning_module
        assert module is not None
        return any(GraphLowering.decide_layout_opt(module, is_inference=inference) for inference in (False, True))
    except Exception as error:
        log.debug("Inductor does not say how it lays out %s: %s", node, error)
        return True
