"""Variances and means over outer dims, which batch norm takes of each channel when it is trained: at the speed at which memory is read.

var_mean = aten.var_mean(x, [0, 2, 3], correction=0)  ->  var, mean = fusebackend.column_moments(permute(x), 0, 3, 0.0, torch.float32)
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.column_moments.estimate import estimate
from fusebackend.patterns.column_moments.ops import column_moments
from fusebackend.patterns.column_moments.sites import MOMENTS, Site, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class ColumnMoments(Pattern):
    """``aten.var_mean`` and ``aten.var`` over dims outside of the innermost one -> ``column_moments``."""

    name = "column_moments"
    anchors = MOMENTS

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        unavailable = loader.load().why_not(g.value(site.source).device, column_moments)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        note = "" if site.scale is None else "computes rsqrt(variance + epsilon)"
        return Match(site.outputs, lambda emitter: _emit(emitter, site), site.interior, note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def both(x):
            return torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)

        def normalised(x):
            variance, mean = torch.var_mean(x, 0, correction=0)
            return (x - mean) * torch.rsqrt(variance + 1e-5)

        def variance(x):
            return x.var(0)

        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.float32, torch.float64):
            image = torch.randn(3, 8, 7, 5).to(dtype, memory_format=torch.channels_last)
            found += [(both, (image,)), *((fn, (torch.randn(70, 33).to(dtype),)) for fn in (variance, normalised))]
        return found


def _emit(emitter: Emitter, site: Site) -> list[fx.Node]:
    x = site.source
    if list(site.order) != sorted(site.order):
        x = emitter.call(aten.permute.default, x, list(site.order))
    moments = emitter.call(column_moments, x, site.begin, site.end, site.correction, site.epsilon, site.dtype)
    results = []
    for i, wanted in enumerate(site.results):
        if wanted is None:
            continue
        result = emitter.call(operator.getitem, moments, i)
        for d in sorted(site.order[site.begin : site.end]) if site.keepdim else ():
            result = emitter.call(aten.unsqueeze.default, result, d)
        results.append(result)
    return results
