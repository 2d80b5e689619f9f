"""Which memory orders an operator's call has. The kernels read and write several; which is fastest depends on what reads the result."""

from __future__ import annotations

import dataclasses
from typing import Any

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d import ops
from fusebackend.patterns.causal_conv1d.memory_order import is_btc
from fusebackend.patterns.causal_conv1d.nodes import size_of
from fusebackend.patterns.causal_conv1d.read_backward import Backward
from fusebackend.patterns.causal_conv1d.read_convolution import Convolution
from fusebackend.patterns.causal_conv1d.read_forward import Forward, is_causal


@dataclasses.dataclass(frozen=True)
class Orders:
    """The memory orders of an operator's call: True for (batch, time, channels), False for (batch, channels, time).

    Attributes:
        operands: that of x and of the incoming gradient; None if they are used in the order that they have.
        result: that of the result, or of x's gradient.
    """

    operands: bool | None
    result: bool


def forward_orders(site: Forward) -> Orders:
    """The memory orders of a forward.

    CPU kernels read and write any order, so they write that of ``site.output``. CUDA kernels write the order of x, or transpose it.
    """
    output = g.value(site.output)
    wanted = output.transpose(1, 2) if site.transposed else output
    if output.device.type == "cpu":
        return Orders(None, is_btc(wanted))
    if not _runs_in_btc(site.conv):
        return Orders(False, False)
    # A result of the graph must have eager's strides. What Inductor's kernels read may have any.
    returned = any(u.op == "output" for u in g.consumers(site.output))
    if returned and site.after is None and not is_btc(wanted) and _transposes(site.conv, site.left, size_of(site.right), backward=False):
        return Orders(None, False)
    return Orders(True, True)


def backward_orders(site: Backward) -> Orders:
    """The memory orders of a backward."""
    dx = g.value(site.results[0] or site.conv.x)
    if dx.device.type == "cpu":
        return Orders(None, is_btc(dx))
    if not _runs_in_btc(site.conv):
        return Orders(False, False)
    # A gradient that is an input of the graph often is (batch, channels, time), as eager's results are. If x's gradient is to be so too, x
    # alone is transposed.
    grad, strides = g.value(site.grad), g.hints(g.value(site.grad).stride())
    grad_is_bct = site.grad.op == "placeholder" and not site.transposed and strides is not None and strides[2] == 1
    dx_is_bct = site.results[0] is None or not is_btc(dx)
    if grad_is_bct and dx_is_bct and _transposes(site.conv, site.left, grad.shape[2] - g.value(site.conv.x).shape[2], backward=True):
        return Orders(None, False)
    return Orders(True, True)


def _runs_in_btc(conv: Convolution) -> bool:
    """Whether CUDA kernels should run in (batch, time, channels) order, which is x's."""
    taps = g.hint(conv.taps)
    return taps is not None and ops.prefers_btc(conv.dtype.itemsize, taps) and is_btc(g.value(conv.x))


def _transposes(conv: Convolution, left: Any, right: Any, backward: bool) -> bool:
    """Whether a CUDA kernel transposes at full speed. Symbolic sizes are judged by their hints; others may be slower."""
    sizes, taps = g.hints(g.value(conv.x).shape), g.hint(conv.taps)
    if sizes is None or taps is None:
        return False
    return ops.transposes_btc(conv.dtype.itemsize, sizes[1], sizes[2], taps, backward) and is_causal(conv, left, right)
