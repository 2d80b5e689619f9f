"""scatter_add along the last dim, the backward of ``gather(x, -1, index)``: each row of the result is written once, by no atomic additions.

    expand: i64[192, 512, 512] = aten.expand(index, [192, 512, 512])
    scatter_add: bf16[192, 512, 512] = aten.scatter_add(full(0), -1, expand, source)
        ->  row_scatter = fusebackend.row_scatter(source, index, 512)

Where rows of the source share a row of the index, as all heads of DeBERTa's relative positions do, it is sorted once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.row_scatter.estimate import estimate
from fusebackend.patterns.row_scatter.ops import limits, row_scatter
from fusebackend.patterns.row_scatter.sites import SUMS, Site, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class RowScatter(Pattern):
    """``aten.scatter_add`` and ``aten.scatter_reduce(..., "sum")`` along the last dim -> ``row_scatter``."""

    name = "row_scatter"
    anchors = SUMS

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        if not _always_fits(site):
            return Reject("rows may become longer than a kernel takes", node)
        unavailable = loader.load().why_not(g.value(node).device, row_scatter)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        interior = (site.self,) if site.onto_zeros and len(site.self.users) == 1 else ()
        note = "" if site.onto_zeros else "onto a tensor"
        return Match((node,), lambda emitter: _emit(emitter, site), interior, note=note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        index, shared = torch.arange(3 * 5 * 40).reshape(3, 5, 40) * 7 % 33, torch.arange(5 * 40).reshape(1, 5, 40) % 33

        def own_index(source, i):
            return source.new_zeros(3, 5, 33).scatter_add(-1, i, source)

        def shared_index(source, i):
            return source.new_zeros(3, 5, 33).scatter_add(2, i.expand(source.shape), source * 2)

        def onto_a_tensor(x, source, i):
            return x.scatter_add(-1, i, source)

        found: list[tuple[Callable, tuple]] = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            source, x = torch.randn(3, 5, 40).to(dtype), torch.randn(3, 5, 33).to(dtype)
            found += [(own_index, (source, index)), (shared_index, (source, shared)), (onto_a_tensor, (x, source, index))]
        return found


def _always_fits(site: Site) -> bool:
    """Whether no other sizes than those that were traced make rows too long: a kernel would refuse them at run time."""
    most = limits()[1]
    return all(isinstance(n, int) or statically_known_true(n <= most) for n in (site.bins, g.value(site.source).shape[-1]))


def _emit(emitter: Emitter, site: Site) -> fx.Node:
    bins = site.bins
    if site.onto_zeros:
        return emitter.call(row_scatter, site.source, site.index, bins if isinstance(bins, int) else site.self.args[0][-1])
    if not isinstance(bins, int):
        bins = emitter.call(aten.sym_size.int, site.self, g.value(site.node).dim() - 1)
    return emitter.call(row_scatter, site.source, site.index, bins, site.self)
