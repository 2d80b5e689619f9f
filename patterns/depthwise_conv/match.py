"""Finds depthwise convolutions, 2-D ones and the 1-D ones that ``causal_conv1d`` leaves, forward and backward.

What follows a forward (channel_epilogue.py of causal_conv1d) is absorbed where nothing else needs the values in between: in inference. All
are matched after Inductor's decompositions, where the backward's graph has the strides of what the forward saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx

from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d.channel_epilogue import read_epilogue
from fusebackend.patterns.causal_conv1d.channel_reference import ACTIVATIONS
from fusebackend.patterns.depthwise_conv.emit import emit_backward, emit_forward
from fusebackend.patterns.depthwise_conv.estimate import backward_workload, forward_workload
from fusebackend.patterns.depthwise_conv.ops import depthwise_conv, depthwise_conv_backward
from fusebackend.patterns.depthwise_conv.sites import Backward, Convolution, read_backward, read_convolution
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class DepthwiseConv(Pattern):
    """The forward.

    Before and after::

        convolution(x, w, b, stride, padding, dilation, groups=C)    ->  depthwise_conv(x, w, b, stride, [*padding, *padding], dilation)

        conv = convolution(x, w, b, stride, padding, dilation, groups=C)
        norm = (conv - mean) * rsqrt(variance + eps) * scale + shift
        silu(norm)                                                   ->  depthwise_conv(..., mean, variance, scale, shift, eps, "silu")
    """

    name = "depthwise_conv"
    anchors = (aten.convolution.default,)
    priority = -1

    def match(self, node: fx.Node) -> Match | Reject | None:
        conv = read_convolution(node)
        if not isinstance(conv, Convolution):
            return conv
        no_kernel = loader.load().why_not(conv.device, depthwise_conv)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")
        after = read_epilogue(node)
        interior = tuple(sorted({node, *after.nodes} - {after.output}))
        note = f"absorbs {after.absorbed}" if after.absorbed else ""
        return Match((after.output,), lambda e: emit_forward(e, conv, after), interior, note, site=(conv, after))

    def estimate(self, match: Match) -> Estimate | Workload:
        return forward_workload(*match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        return [*_examples(), *_normed_examples()]


class DepthwiseConvBackward(Pattern):
    """The backward, with the bias's gradient.

    Before and after::

        gradients = convolution_backward(g, x, w, ...)
        db = sum(g, [0, 2, 3])                                       ->  dx, dw, db = depthwise_conv_backward(g, x, w, ...)
    """

    name = "depthwise_conv_backward"
    anchors = (aten.convolution_backward.default,)
    priority = -1

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read_backward(node)
        if not isinstance(site, Backward):
            return site
        no_kernel = loader.load().why_not(site.conv.device, depthwise_conv_backward)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")
        outputs = tuple(r for r in site.results if r is not None)
        if not outputs:
            return None
        return Match(outputs, lambda e: emit_backward(e, site), (node,), site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return backward_workload(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        # In 16 bits eager mode's CPU kernels round in between, so their gradients are not to be compared with.
        return [(_gradients_of(fn), (torch.randn_like(fn(*args)), *args)) for fn, args in _examples() if args[0].dtype == torch.float32]


def _normed_examples() -> list[tuple[Callable, tuple]]:
    """Batch norm in inference, and each activation, behind a convolution; in fp32, since eager mode rounds 16 bits in between."""

    def normed(activation: Callable) -> Callable:
        return lambda x, w, v, variance: activation(F.batch_norm(F.conv2d(x, w, None, 1, 1, 1, 8), v, variance, v, v))

    args = torch.randn(2, 8, 9, 10), torch.randn(8, 1, 3, 3), torch.randn(8), torch.rand(8).add(0.5)
    return [(normed(activation), args) for activation in (lambda y: y, *ACTIVATIONS.values())]


def _gradients_of(fn: Callable) -> Callable:
    """The backward of ``fn``, of the incoming gradient and its arguments: verification looks at a graph at a time."""

    def gradients(grad, x, w, b):
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        return torch.autograd.grad(fn(*leaves), leaves, grad)

    return gradients


def _examples() -> list[tuple[Callable, tuple]]:
    def plain(x, w, b):
        return F.conv2d(x, w, b, padding=1, groups=8)

    def halved(x, w, b):
        return F.conv2d(x, w, b, stride=2, padding=2, dilation=2, groups=8)

    def dilated(x, w, b):
        return F.conv1d(x, w, b, dilation=2, groups=8)

    found: list[tuple[Callable, tuple]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for fn, shape, taps in ((plain, (2, 8, 9, 10), (3, 3)), (halved, (2, 8, 12, 11), (3, 5)), (dilated, (2, 8, 20), (3,))):
            for outputs in (8, 16):
                w = torch.randn(outputs, 1, *taps, dtype=dtype)
                x = torch.randn(shape, dtype=dtype)
                found.append((fn, (x, w, torch.randn(outputs, dtype=dtype))))
                if len(shape) == 4:
                    found.append((fn, (x.to(memory_format=torch.channels_last), w, torch.randn(outputs, dtype=dtype))))
    return found
