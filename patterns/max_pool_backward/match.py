"""Gradients of max pooling: each element looks at the windows that hold it, and reads what the forward kept of them in 8 bits.

    indices = prims._low_memory_max_pool_offsets_to_indices(offsets, [3, 3], [H, W], [2, 2], [1, 1], [1, 1])
    dx = aten.max_pool2d_with_indices_backward(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)
        ->  dx = fusebackend.max_pool_backward(g, offsets, [H, W], [3, 3], [2, 2], [1, 1], [1, 1], [0, 1, 2, 3])

Inductor computes an index of each window that an element may be in, for each element, or adds to zeros by atomic additions in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.max_pool_backward.estimate import estimate
from fusebackend.patterns.max_pool_backward.ops import max_pool_backward
from fusebackend.patterns.max_pool_backward.sites import BACKWARDS, SCATTER, Site, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class MaxPoolBackward(Pattern):
    """``aten.max_pool2d_with_indices_backward`` and its kin, or ``aten.scatter_add`` in its place -> ``max_pool_backward``."""

    name = "max_pool_backward"
    anchors = (*BACKWARDS, SCATTER)
    devices = ("cuda",)
    priority = 1  # others take a scatter for itself

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        if g.value(node).device.type not in self.devices:
            return Reject("there is no kernel for CPUs", node, "no_kernel")
        unavailable = loader.load().why_not(g.value(node).device, max_pool_backward)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        note = f"windows of {' by '.join(map(str, site.kernel_size))}"
        return Match((site.output,), lambda emitter: _emit(emitter, site), site.interior, note=note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for pool, shape in ((F.max_pool1d, (2, 3, 9)), (F.max_pool2d, (2, 3, 7, 9)), (F.max_pool3d, (2, 3, 5, 7, 6))):
                found.append((functools.partial(_gradient, pool=pool), (torch.randn(shape).to(dtype),)))
        return found


def _gradient(x: torch.Tensor, pool: Callable) -> torch.Tensor:
    """Of pooling ``x`` by windows of three, every second of them."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = pool(x, 3, 2, 1)
        (dx,) = torch.autograd.grad(out, x, out.detach())
    return dx


def _emit(emitter: Emitter, site: Site) -> fx.Node:
    windows = list(site.kernel_size), list(site.stride), list(site.padding), list(site.dilation)
    result = emitter.call(max_pool_backward, site.grad, site.offsets, list(site.sizes), *windows, site.order)
    return emitter.call(aten.clone.default, result, memory_format=torch.contiguous_format) if site.is_reordered else result
