"""Which memory order pays: kernels can read and write several, and which of them is fastest depends on who reads the result.

Every site is expected to pay: PyTorch has one simple kernel for all depthwise 1-D convolutions, which Inductor calls, and which pads,
slices and applies SiLU in kernels of their own. So the patterns keep the answer of :meth:`fusebackend.Pattern.estimate`.
"""

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
    """The memory orders of a launch: True for (batch, time, channels), False for (batch, channels, time), None for that which is there.

    Attributes:
        operands: of x, and of the incoming gradient.
        result: of the result, or of x's gradient.
    """

    operands: bool | None
    result: bool


def forward_orders(site: Forward) -> Orders:
    """CPU kernels go from any order to any other, so they write the order of ``site.output``. CUDA kernels stay in x's, or transpose."""
    output = g.value(site.output)
    wanted = output.transpose(1, 2) if site.transposed else output
    if output.device.type == "cpu":
        return Orders(None, is_btc(wanted))
    if not _runs_in_btc(site.conv):
        return Orders(False, False)
    # A result of the graph has eager's strides; any other Inductor reads in whatever order it has.
    returned = any(u.op == "output" for u in site.output.users)
    if returned and not is_btc(wanted) and _transposes(site.conv, site.left, size_of(site.right), backward=False):
        return Orders(None, False)
    return Orders(True, True)


def backward_orders(site: Backward) -> Orders:
    """The same for the gradients: of x's gradient, and of both operands."""
    dx = g.value(site.results[0] or site.conv.x)
    if dx.device.type == "cpu":
        return Orders(None, is_btc(dx))
    if not _runs_in_btc(site.conv):
        return Orders(False, False)
    # Where the gradient comes into the graph as (batch, channels, time), like eager's results, and x's is wanted so, x alone is transposed.
    grad, strides = g.value(site.grad), g.hints(g.value(site.grad).stride())
    comes_so = site.grad.op == "placeholder" and not site.transposed and strides is not None and strides[2] == 1
    wanted_so = site.results[0] is None or not is_btc(dx)
    if comes_so and wanted_so and _transposes(site.conv, site.left, grad.shape[2] - g.value(site.conv.x).shape[2], backward=True):
        return Orders(None, False)
    return Orders(True, True)


def _runs_in_btc(conv: Convolution) -> bool:
    """Whether CUDA kernels should run in (batch, time, channels) order, which is x's."""
    taps = g.hint(conv.taps)
    return taps is not None and ops.prefers_btc(conv.dtype.itemsize, taps) and is_btc(g.value(conv.x))


def _transposes(conv: Convolution, left: Any, right: Any, backward: bool) -> bool:
    """Whether a CUDA kernel transposes at full speed. Symbolic sizes count as those that were seen: others cost time, nothing else."""
    sizes, taps = g.hints(g.value(conv.x).shape), g.hint(conv.taps)
    if sizes is None or taps is None:
        return False
    return ops.transposes_btc(conv.dtype.itemsize, sizes[1], sizes[2], taps, backward) and is_causal(conv, left, right)
