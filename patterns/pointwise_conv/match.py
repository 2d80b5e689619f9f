"""The gradients of 1x1 convolutions as matrix products.

Channels last, a 1x1 convolution multiplies a matrix of a row a pixel, and its gradients are two products. cuDNN computes these by kernels
like cuBLAS's, and by some that are slower, and takes more of the host before it launches them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.pointwise_conv.sites import Gradients, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject

aten = torch.ops.aten


class PointwiseConvBackward(Pattern):
    """The gradients, channels last.

    Before and after::

        dx, dw, _ = convolution_backward(g, x, w, ...)      ->  dx = mm(rows of g, w), dw = mm((rows of g).t(), rows of x)
    """

    name = "pointwise_conv_backward"
    anchors = (aten.convolution_backward.default,)
    devices = ("cuda",)
    last = True  # depthwise ones go first: they gain more of what timing may take

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        return Match(site.outputs, lambda e: _emit(e, site), (node,), site=site) if isinstance(site, Gradients) else site

    def estimate(self, match: Match) -> Estimate:
        return Estimate(None, "how long cuDNN takes for 1x1 convolutions is not estimated", "unmeasured", is_lighter=True)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def gradients(grad, x, w):
            x, w = (t.detach().requires_grad_() for t in (x, w))
            return torch.autograd.grad(F.conv2d(x, w), (x, w), grad)

        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(3, 8, 5, 7, dtype=dtype).contiguous(memory_format=torch.channels_last)
            w = torch.randn(6, 8, 1, 1, dtype=dtype)
            found.append((gradients, (torch.randn_like(F.conv2d(x, w)), x, w)))
        return found


def _emit(e: Emitter, site: Gradients) -> list[fx.Node]:
    grad, found = _rows(e, site.grad), []
    if site.of_x is not None:
        matrix = e.call(aten.view.default, site.weight, list(g.value(site.weight).shape[:2]))
        found.append(_as(e, e.call(aten.mm.default, grad, matrix), site.of_x))
    if site.of_weight is not None:
        turned = e.call(aten.permute.default, grad, [1, 0])
        found.append(_as(e, e.call(aten.mm.default, turned, _rows(e, site.x)), site.of_weight))
    return found


def _rows(e: Emitter, tensor: fx.Node) -> fx.Node:
    """A (batch, channels, pixels ...) tensor that lies channels last, as the matrix that it is: (batch * pixels, channels)."""
    dims = range(2, g.value(tensor).dim())
    return e.call(aten.view.default, e.call(aten.permute.default, tensor, [0, *dims, 1]), [-1, g.value(tensor).shape[1]])


def _as(e: Emitter, made: fx.Node, old: fx.Node) -> fx.Node:
    """A product, which lies as what it takes the place of, with the sizes of that, and its strides along dims of one element."""
    return e.call(aten.as_strided.default, made, list(g.value(old).shape), list(g.value(old).stride()))
