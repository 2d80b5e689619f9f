"""Sums over outer dims, e.g. gradients of biases and of norms' weights: at the speed at which memory is read.

    sum_1: bf16[128] = aten.sum(y, [0])  ->  column_sum = fusebackend.column_sum(y, 0, 1, False, torch.bfloat16)

What is summed becomes a tensor first. That pays where it is one anyway, and where Inductor, which fuses what computes it into the sum, then
can't divide the sum among enough threads: behind indirect loads, as in ``(x[i] * w).sum(0)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.column_sum.estimate import estimate
from fusebackend.patterns.column_sum.ops import column_sum
from fusebackend.patterns.column_sum.sites import SUMS, Site, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class ColumnSum(Pattern):
    """``aten.sum`` and ``aten.mean`` over dims outside of the innermost one -> ``column_sum``."""

    name = "column_sum"
    anchors = SUMS
    priority = -1  # a sum of products is tried as a matrix product first

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        unavailable = loader.load().why_not(g.value(node).device, column_sum)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        return Match((node,), lambda emitter: _emit(emitter, site), site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def rows(x):
            return x.sum(0)

        def middle(x):
            return x.sum((1, 2), keepdim=True)

        def mean(x):
            return x.mean((0, 1))

        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return [(fn, (torch.randn(3, 70, 5, 33).to(dtype),)) for fn in (rows, middle, mean) for dtype in dtypes]


def _emit(emitter: Emitter, site: Site) -> fx.Node:
    x = site.source
    if list(site.order) != sorted(site.order):
        x = emitter.call(aten.permute.default, x, list(site.order))
    out = emitter.call(column_sum, x, site.begin, site.end, site.is_mean, g.value(site.node).dtype)
    for d in sorted(site.summed) if site.keepdim else ():
        out = emitter.call(aten.unsqueeze.default, out, d)
    return out
