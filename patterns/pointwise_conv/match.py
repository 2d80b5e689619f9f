"""1x1 convolutions as matrix products, which a library computes in fewer steps.

Of images that lie as planes a 1x1 convolution is the product of its weight with each image. cuDNN's kernels for tensor cores want channels
last: it copies the images into that order, and the result back. Channels last, the gradients are products of the matrix that has a row a
pixel. cuDNN computes these by kernels like cuBLAS's, and by some that are slower, and takes more of the host before it launches them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.pointwise_conv.sites import Convolution, Gradients, read_convolution, read_gradients, why_not_planes
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject

aten = torch.ops.aten

_NOT_ESTIMATED = "how long cuDNN takes for 1x1 convolutions is not estimated"


class PointwiseConv(Pattern):
    """The forward, of planes.

    Before and after::

        convolution(x, w, b, [1], [0], ...)         ->  bmm(expand(w), x) + b
    """

    name = "pointwise_conv"
    anchors = (aten.convolution.default,)
    devices = ("cuda",)
    last = True  # of what other families leave, and of what Inductor runs channels last whatever they took

    def match(self, node: fx.Node) -> Match | Reject | None:
        conv = read_convolution(node)
        if not isinstance(conv, Convolution):
            return conv
        reason = why_not_planes(conv)
        return Reject(reason, node) if reason else Match((node,), lambda e: _emit_product(e, conv), site=conv)

    def estimate(self, match: Match) -> Estimate:
        return Estimate(None, _NOT_ESTIMATED, "unmeasured")

    def examples(self) -> list[tuple[Callable, tuple]]:
        return [(F.conv1d, args) for args in _examples((9,))]


class PointwiseConvBackward(Pattern):
    """The gradients, channels last or of planes.

    Before and after::

        dx, dw, _ = convolution_backward(g, x, w, ...)      ->  dx = mm(rows of g, w), dw = mm((rows of g).t(), rows of x)
                                                            or  dx = bmm(expand(w.t()), g), dw = convolution_backward(g, x, w, ...)[1]
    """

    name = "pointwise_conv_backward"
    anchors = (aten.convolution_backward.default,)
    devices = ("cuda",)
    last = True

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read_gradients(node)
        if not isinstance(site, Gradients):
            return site
        emit = _emit_rows if site.are_rows else _emit_planes
        return Match(site.outputs, lambda e: emit(e, site), (node,), site=site)

    def estimate(self, match: Match) -> Estimate:
        return Estimate(None, _NOT_ESTIMATED, "unmeasured", is_lighter=match.site.are_rows)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def gradients(grad, x, w):
            x, w = (t.detach().requires_grad_() for t in (x, w))
            return torch.autograd.grad(F.conv2d(x, w), (x, w), grad)

        tensors = [[t.contiguous(memory_format=torch.channels_last) for t in args[:2]] for args in _examples((5, 7))]
        return [(gradients, (torch.randn_like(F.conv2d(x, w)), x, w)) for x, w in tensors]


def _emit_product(e: Emitter, conv: Convolution) -> fx.Node:
    made = _times_images(e, _matrix(e, conv), conv.x, conv.node)
    bias = g.arguments(conv.node)["bias"]
    if bias is None:
        return made
    return e.call(aten.add.Tensor, made, e.call(aten.view.default, bias, [-1] + [1] * (g.value(conv.x).dim() - 2)))


def _emit_planes(e: Emitter, site: Gradients) -> list[fx.Node]:
    found = []
    if site.of_x is not None:
        found.append(_times_images(e, e.call(aten.permute.default, _matrix(e, site.conv), [1, 0]), site.grad, site.of_x))
    if site.of_weight is not None:
        given = g.arguments(site.conv.node) | {"output_mask": [False, True, False]}
        found.append(e.call(operator.getitem, e.call(aten.convolution_backward.default, *given.values()), 1))
    return found


def _emit_rows(e: Emitter, site: Gradients) -> list[fx.Node]:
    grad, found = _rows(e, site.grad), []
    if site.of_x is not None:
        found.append(_as(e, e.call(aten.mm.default, grad, _matrix(e, site.conv)), site.of_x))
    if site.of_weight is not None:
        turned = e.call(aten.permute.default, grad, [1, 0])
        found.append(_as(e, e.call(aten.mm.default, turned, _rows(e, site.conv.x)), site.of_weight))
    return found


def _times_images(e: Emitter, matrix: fx.Node, images: fx.Node, old: fx.Node) -> fx.Node:
    """The product of a matrix with each of (batch, rows, pixels ...), in one call."""
    (batch, rows, *pixels), made = g.value(images).shape, g.value(matrix).shape[0]
    flat = e.call(aten.view.default, images, [batch, rows, math.prod(pixels)])
    return _as(e, e.call(aten.bmm.default, e.call(aten.expand.default, matrix, [batch, made, rows]), flat), old)


def _rows(e: Emitter, tensor: fx.Node) -> fx.Node:
    """A (batch, channels, pixels ...) tensor that lies channels last, as the matrix that it is: (batch * pixels, channels)."""
    dims = range(2, g.value(tensor).dim())
    return e.call(aten.view.default, e.call(aten.permute.default, tensor, [0, *dims, 1]), [-1, g.value(tensor).shape[1]])


def _matrix(e: Emitter, conv: Convolution) -> fx.Node:
    return e.call(aten.view.default, conv.weight, [conv.outputs, conv.channels])


def _as(e: Emitter, made: fx.Node, old: fx.Node) -> fx.Node:
    """A product, which lies as what it takes the place of, with the sizes of that, and its strides along dims of one element."""
    return e.call(aten.as_strided.default, made, list(g.value(old).shape), list(g.value(old).stride()))


def _examples(pixels: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    return [
        (torch.randn(3, 8, *pixels, dtype=dtype), torch.randn(6, 8, *[1] * len(pixels), dtype=dtype), torch.randn(6, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float16)
    ]
