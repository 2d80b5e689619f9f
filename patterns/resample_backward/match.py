"""Gradients of interpolations (linear, cubic, nearest): a sum at a grid of indices becomes one gather, without atomic additions.

    mul: f32[B, C, 2H, 2W] = aten.mul(g, h)                      neg = aten.neg(mul); rest = aten.add(g, neg)    (and once more along w)
    put: f32[B, C, H, W] = aten.index_put(full(0), [None, None, below, right], aten.mul(mul, w), True)
    ...                                                          three more of such
    dx = prims.convert_element_type(aten.add(aten.add(aten.add(put, put_1), put_2), put_3), bf16)
        ->  dx = fusebackend.resample_backward(g, 2, [above, below, left, right], [1 - h, h, 1 - w, w], [2, 2], [H, W], [0, 1, 2, 3], bf16)

Inductor adds every element of each of the four by an atomic addition in fp32, to zeros that it writes before, and sums up the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.resample_backward import weights
from fusebackend.patterns.resample_backward.estimate import estimate
from fusebackend.patterns.resample_backward.ops import accumulator, resample_backward
from fusebackend.patterns.resample_backward.sites import PUTS, Site, read
from fusebackend.patterns.resample_backward.weights import ONE, Weight
from fusebackend.rewriting.emitted_sizes import size_of
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class ResampleBackward(Pattern):
    """``aten.index_put`` at grids of indices, with weights, the sum of the terms and casts -> ``resample_backward``."""

    name = "resample_backward"
    anchors = PUTS
    devices = ("cuda",)
    replaces_scatters = True
    priority = 1  # of one axis' two terms the family index_add would take each for itself

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        if g.value(node).device.type not in self.devices:
            return Reject("there is no kernel for CPUs", node, "no_kernel")
        unavailable = loader.load().why_not(g.value(node).device, resample_backward)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        note = " by ".join(str(len(terms)) for terms in site.terms) + " terms"
        return Match((site.output,), lambda emitter: _emit(emitter, site), site.interior, note=note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for mode, shape in (
                ("linear", (2, 3, 9)),
                ("nearest", (2, 3, 5, 7)),
                ("bilinear", (2, 3, 5, 7)),
                ("trilinear", (2, 3, 3, 4, 5)),
            ):
                gradient = functools.partial(_gradient, mode=mode)
                found.append((gradient, (torch.randn(shape).to(dtype),)))
        return found


def _gradient(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Of an interpolation of ``x`` to twice its size."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = F.interpolate(x, scale_factor=2, mode=mode, align_corners=None if mode == "nearest" else False)
        (dx,) = torch.autograd.grad(out, x, out.detach())
    return dx


def _emit(emitter: Emitter, site: Site) -> fx.Node:
    indices: list[fx.Node] = []
    vectors: list[fx.Node] = []
    is_weighted = any(weight != ONE for terms in site.terms for _, weight in terms)
    for axis, terms in zip(site.axes, site.terms):
        ones, made = functools.partial(_ones, emitter, site, axis), dict[Weight, fx.Node]()
        for index, weight in terms:
            indices.append(weights.as_vector(emitter, index))
            if is_weighted:
                vectors.append(weights.emit(emitter, weight, ones, made))
    dtype = g.value(site.output).dtype
    counts = [len(terms) for terms in site.terms]
    result = emitter.call(resample_backward, site.grad, site.dim, indices, vectors, counts, site.sizes, site.order, dtype)
    for other in reversed(site.others):
        result = emitter.call(aten.add.Tensor, other, result)
    if not site.is_reordered:
        return result
    return emitter.call(aten.clone.default, result, memory_format=torch.contiguous_format)


def _ones(emitter: Emitter, site: Site, axis: int) -> fx.Node:
    grad = g.value(site.grad)
    named: dict[str, Any] = dict(dtype=accumulator(grad.dtype), device=grad.device, pin_memory=False)
    return emitter.call(aten.full.default, [size_of(emitter, site.grad, axis)], 1.0, **named)
