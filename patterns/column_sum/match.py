"""Sums over outer dims, e.g. gradients of biases and of norms' weights: at the speed at which memory is read.

    sum_1: bf16[128] = aten.sum(y, [0])  ->  column_sum = fusebackend.column_sum(y, 0, 1, False, torch.bfloat16)

What is summed becomes a tensor first. That pays where it is one anyway, and where Inductor, which fuses what computes it into the sum, then
can't divide the sum among enough threads: behind indirect loads, as in ``(x[i] * w).sum(0)``. Products of two tensors do not: they are
computed as they are summed, in one pass with the sum of a factor, if there is one.

    mul = aten.mul(g, x)
    sum_1 = aten.sum(mul, [0])
    sum_2 = aten.sum(g, [0])  ->  sum_2, sum_1 = fusebackend.column_sums(g, x, 0, 1, ...)
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.column_sum.estimate import estimate
from fusebackend.patterns.column_sum.groups import Nested, Together, nested, together, views_behind
from fusebackend.patterns.column_sum.ops import column_sum, column_sums, wide_dtype
from fusebackend.patterns.column_sum.sites import SUMS, Site, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten, prims = torch.ops.aten, torch.ops.prims


class ColumnSum(Pattern):
    """``aten.sum`` and ``aten.mean`` over dims outside of the innermost one -> ``column_sum``, ``column_sums``."""

    name = "column_sum"
    anchors = SUMS
    priority = -1  # a sum of products is tried as a matrix product first

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        unavailable = loader.load().why_not(g.value(node).device, column_sum, column_sums)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")
        return _match(together(site) or nested(site) or site)

    def estimate(self, match: Match) -> Estimate | Workload | Sequence[Workload]:
        found, parts = estimate(match.site), _parts(match.site)
        if isinstance(found, Estimate) or not parts:
            return found
        less = [(part, estimate(part)) for part in parts]
        return [found, *(dataclasses.replace(w, match=_match(part)) for part, w in less if isinstance(w, Workload))]

    def examples(self) -> list[tuple[Callable, tuple]]:
        def rows(x):
            return x.sum(0)

        def middle(x):
            return x.sum((1, 2), keepdim=True)

        def mean(x):
            return x.mean((0, 1))

        def moments(x):
            return x.mean((0, 1)), (x * x).mean((0, 1))

        def norm(x):
            return x.sum((0, 1)), (x * torch.ones_like(x).cumsum(0)).sum((0, 1))

        def narrowing(x):
            return x.sum(0), x.sum((0, 1))

        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        functions = (rows, middle, mean, moments, norm, narrowing)
        return [(fn, (torch.randn(3, 70, 5, 33).to(dtype),)) for fn in functions for dtype in dtypes]


def _match(found: Site | Together | Nested) -> Match:
    if isinstance(found, Site):
        return Match((found.node,), lambda emitter: _emit(emitter, found), site=found)
    ends = [(s.node, *views_behind(s.node)) for s in found.sums]
    outputs, behind = tuple(end[-1] for end in ends), tuple(n for end in ends for n in end[:-1])
    if isinstance(found, Together):
        return Match(outputs, lambda emitter: _emit_together(emitter, found), (*_interior(found), *behind), site=found)
    return Match(outputs, lambda emitter: _emit_nested(emitter, found), behind, site=found)


def _parts(found: Site | Together | Nested) -> list[Site | Together]:
    """Of what is computed together, less."""
    if isinstance(found, Site):
        return []
    if isinstance(found, Nested):
        return list(found.sums)
    parts = [] if found.plain is None else [found.alone(), found.plain]
    # Where both factors would have to become tensors first, it is better that their product does.
    return [*parts, found.products] if all(map(g.is_fusable, found.sources)) else parts


def _interior(found: Together) -> tuple[fx.Node, ...]:
    """The product, and the casts around it, that nothing else reads."""
    inside = {s.node for s in found.sums}
    pending = [n for s in found.sums for n in s.node.all_input_nodes]
    interior = set[fx.Node]()
    while pending:
        node = max(pending)
        pending.remove(node)
        if node not in found.sources and {*node.users} <= inside:
            inside.add(node)
            interior.add(node)
            pending += [n for n in node.all_input_nodes if n not in inside and n not in pending]
    return tuple(sorted(interior))


def _emit(emitter: Emitter, site: Site) -> fx.Node:
    x = _ordered(emitter, site, site.source)
    out = emitter.call(column_sum, x, site.begin, site.end, site.is_mean, g.value(site.node).dtype)
    return _kept(emitter, site, out)


def _emit_together(emitter: Emitter, found: Together) -> list[fx.Node]:
    x, y = (None if n is None else _ordered(emitter, found.products, n) for n in (found.x, found.y))
    plain = (None, False) if found.plain is None else (g.value(found.plain.node).dtype, found.plain.is_mean)
    products = g.value(found.products.node).dtype, found.products.is_mean
    made = emitter.call(column_sums, x, y, found.products.begin, found.products.end, *plain, *products, found.rounded)
    return [viewed(emitter, site, emitter.call(operator.getitem, made, i)) for i, site in enumerate(found.sums)]


def _emit_nested(emitter: Emitter, found: Nested) -> list[fx.Node]:
    inner, outer = found.sums
    dtype = g.value(inner.node).dtype
    wide = wide_dtype(wide_dtype(g.value(inner.source).dtype, dtype), g.value(outer.node).dtype)
    x = _ordered(emitter, inner, inner.source)
    partial = emitter.call(column_sum, x, inner.begin, inner.end, inner.is_mean, wide)
    total = emitter.call(column_sum, partial, found.begin, found.end, outer.is_mean, g.value(outer.node).dtype)
    if dtype is not wide:
        partial = emitter.call(prims.convert_element_type.default, partial, dtype)
    return [viewed(emitter, inner, partial), viewed(emitter, outer, total)]


def _ordered(emitter: Emitter, site: Site, x: fx.Node) -> fx.Node:
    return x if list(site.order) == sorted(site.order) else emitter.call(aten.permute.default, x, list(site.order))


def _kept(emitter: Emitter, site: Site, out: fx.Node) -> fx.Node:
    for d in sorted(site.summed) if site.keepdim else ():
        out = emitter.call(aten.unsqueeze.default, out, d)
    return out


def viewed(emitter: Emitter, site: Site, out: fx.Node) -> fx.Node:
    """The result as it is read."""
    out = _kept(emitter, site, out)
    for view in views_behind(site.node):
        out = emitter.call(view.target, out, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]
    return out
