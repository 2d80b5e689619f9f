"""Sums and means over outer dims, or over those of each image, of computed values, read from the graph: those that one pass computes
together."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum import sites as sums
from fusebackend.patterns.column_sum.groups import can_stand_together
from fusebackend.patterns.column_sum.producers import Producer, Tensors, other_reductions, producer_of
from fusebackend.patterns.column_sum.sites import SUMS
from fusebackend.patterns.computed_sums import expression
from fusebackend.patterns.computed_sums.expression import Expression, Unreadable, laid_out
from fusebackend.patterns.computed_sums.ops import MOST_ROWS, RESULTS
from fusebackend.patterns.computed_sums.program import MOST_SUMS
from fusebackend.patterns.computed_sums.reading import Reading
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Site:
    """Sums over the same dims, or means, of values that are computed of the same tensors.

    Attributes:
        sums: each with its place in memory, which is that of all; in the order of the graph.
        expression: what is summed.
    """

    sums: tuple[sums.Site, ...]
    expression: Expression

    @property
    def order(self) -> tuple[int, ...]:
        return self.sums[0].order

    @property
    def begin(self) -> int:
        """Of the summed dims in memory order; those before them are a batch."""
        return self.sums[0].begin

    @property
    def end(self) -> int:
        """Of the summed dims in memory order; those from there on are columns."""
        return self.sums[0].end

    @property
    def is_mean(self) -> bool:
        return self.sums[0].is_mean

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What is computed, and casts before the sums, but not these."""
        behind = set[fx.Node]().union(*(sums.between(one, [one.source]) for one in self.sums))
        return tuple(sorted({*self.expression.nodes, *behind} - {one.node for one in self.sums}))

    @functools.cached_property
    def reading(self) -> Reading:
        return Reading.of(self.expression, self.order, self.sizes, self.begin, self.end)

    @functools.cached_property
    def producer(self) -> Producer:
        """What computes the tensors that the program reads, where Inductor would do so inside of its sums: loops that no program has."""
        tensors, inside = Tensors(), {*self.nodes, *(one.node for one in self.sums)}
        computed = [leaf.node for leaf in self.expression.leaves if not tensors.is_one(g.through_views(leaf.node))]
        return producer_of(*computed, inside=inside)

    @property
    def sizes(self) -> list[int]:
        """Of what is summed, by hints, in memory order."""
        shape = g.value(self.sums[0].source).shape
        return g.hints([shape[d] for d in self.order]) or []


def read(node: fx.Node) -> Site | Reject | None:
    """The sums that are computed with that at ``node``; why no kernel does; or None if nothing is computed in it, or it is none over
    rows, or if rows are gathered inside of it: they would become a tensor first, and so may what is computed of them (``column_sum``)."""
    if expression.is_tensor_anyway(g.through_views(node.args[0])):  # type: ignore[arg-type]
        return None
    first = sums.read(node)
    if not isinstance(first, sums.Site):
        return first
    try:
        alone = _site((first,))
        if isinstance(alone, Reject):
            return alone
        group = _together(first, alone)
        together = _site(group) if len(group) > 1 else alone
    except Unreadable as unreadable:
        reason, where = unreadable.args
        return Reject(reason, where or node)
    found = together if isinstance(together, Site) else alone
    return found if _is_computed(found) and not found.producer.is_indirect else None


def _together(first: sums.Site, alone: Site) -> tuple[sums.Site, ...]:
    """The group of sums with ``first``."""
    tensors = [leaf.node for leaf in alone.expression.leaves]
    found = [first]
    for node in other_reductions({first.node}, tensors):
        other = sums.read(node) if node.target in SUMS and node not in tensors else None
        if isinstance(other, sums.Site) and _is_alike(first, other) and can_stand_together((*found, other), tensors):
            found.append(other)
    found.sort(key=lambda s: s.node)
    if len(found) > MOST_SUMS:  # each belongs to one group: they are taken by fours
        at = found.index(first) // MOST_SUMS * MOST_SUMS
        found = found[at : at + MOST_SUMS]
    return tuple(found)


def _is_alike(first: sums.Site, other: sums.Site) -> bool:
    """Whether two sums, or means, are over the same dims of tensors of the same size and order."""
    same = (first.order, first.begin, first.end, first.is_mean) == (other.order, other.begin, other.end, other.is_mean)
    return same and g.same_sizes(g.value(first.source).shape, g.value(other.source).shape)


def _site(group: tuple[sums.Site, ...]) -> Site | Reject:
    """The site of sums, if what all of them need is there before the first is read."""
    value = g.value(group[0].source)
    sizes = g.hints(value.shape)
    if sizes is None:
        return Reject("sizes are not known before run time (unbacked symbols)", group[0].node)
    for one in group:
        if g.value(one.node).dtype not in RESULTS:
            return Reject(f"sums in {g.value(one.node).dtype} are not supported: fp32 and 16 bits are", one.node)
    found = expression.read([s.source for s in group], math.prod(sizes))
    site = Site(group, found)
    reason = _why_not_laid_out(site)
    if reason:
        return Reject(reason, group[0].node)
    if len(group) > 1 and not can_stand_together(group, [leaf.node for leaf in found.leaves]):
        return Reject("they can't be computed at one place of the graph", group[0].node)
    return site


def _is_computed(site: Site) -> bool:
    """Whether there is more to compute than products of tensors, which ``column_sum`` computes."""
    return site.expression.statements > sum(s.source.target is aten.mul.Tensor for s in site.sums)


def _why_not_laid_out(site: Site) -> str | None:
    """Why what is read in full would have to be copied, or none of it is: the first dim in memory must not depend on the tensor."""
    domain, end = site.sizes, site.end
    if math.prod(domain[:end]) > MOST_ROWS:
        return f"more than {MOST_ROWS} rows are not supported"
    is_read = False
    for leaf in site.expression.leaves:
        found = laid_out(site.order, leaf)
        if found is None:
            return "sizes are not known before run time (unbacked symbols)"
        if 1 < math.prod(found[0][end:]) < math.prod(domain[end:]):
            what = f"{g.describe(leaf.node)} ({g.spec(g.value(leaf.node))})"
            return f"{what} varies along some of the dims that are kept and not along others: kernels read these dims as one"
        if not expression.is_full(found[0], math.prod(domain)):
            continue
        is_read |= list(found[0]) == list(domain)
        if not expression.collapses(*expression.as_matrix(*found, end), tuple([*domain[:end], math.prod(domain[end:])])):
            return f"{g.describe(leaf.node)} ({g.spec(g.value(leaf.node))}) lies in memory in another order than what is summed"
    return None if is_read else "no tensor is read element by element"
