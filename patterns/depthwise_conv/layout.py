"""In which memory order Inductor runs a convolution: not always the graph's.

When it lowers a forward graph, Inductor decides whether its 2-D convolutions take and give tensors in channels-last order (its layout
optimisation). What its own kernels compute is then stored in that order at once; a tensor that is given to the graph is copied, and so
is a result that leaves the graph. A backward graph has the strides of what the forward saved, in which this is settled.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.depthwise_conv.ops import is_channels_last
from fusebackend.patterns.depthwise_conv.sites import Convolution
from fusebackend.rewriting.convolution_layout import is_channels_last_optimised, is_followed, is_given


@dataclasses.dataclass(frozen=True)
class Layout:
    """The memory orders in which a forward is run, True for channels last.

    Attributes:
        ours: of x and of the result, for our operator.
        inductors: the same for Inductor's.
        copies_x, copies_result: whether Inductor copies them from one order to the other.
        differs: whether either is not the graph's.
    """

    ours: tuple[bool, bool]
    inductors: tuple[bool, bool]
    copies_x: bool = False
    copies_result: bool = False
    differs: bool = False


def layout_of(conv: Convolution, output: fx.Node) -> Layout | None:
    """How the forward ``conv``, with what follows it up to ``output``, is run; None where Inductor does not say."""
    x, result = g.value(conv.x), g.value(output)
    if conv.is_1d:
        orders = (is_channels_last(x.unsqueeze(2)), is_channels_last(result.unsqueeze(2)))
        return Layout(orders, orders)
    orders = (is_channels_last(x), is_channels_last(result))
    if all(orders):
        return Layout(orders, orders)
    optimises = is_channels_last_optimised(conv.node.graph)
    if optimises is None:
        return None
    if not optimises:
        return Layout(orders, orders)
    given = is_given(conv.x)
    leaves = all(user.op == "output" for user in output.users)
    # Our operator is no convolution to Inductor: where none is left behind it, everything stays as it is in the graph.
    x_order = orders[0] if given or not is_followed(conv.node) else True
    ours = (x_order, orders[1] if orders[0] != orders[1] else x_order)
    return Layout(ours, (True, True), given and not orders[0], leaves and not orders[1], True)
