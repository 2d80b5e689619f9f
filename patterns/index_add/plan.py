"""One sort of an index for all the sums of a graph that go by it: the layers of a graph network, and their counts.

    scatter_add(full(0), 0, expand(view(dst)), index(x, [src]))   ->  plan = index_plan(dst, rows)
    scatter_add(full(0), 0, dst, full(1))                             index_add_zeros(rows, 0, dst, x, source_index=src, plan=plan)
                                                                      the differences of the plan's offsets
By a plan, each row of the output is written once, rounded once, without atomics; a count needs no more than where each
row's entries begin and end.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add.ops import INDEX_PLAN, SOURCE_STRICT
from fusebackend.patterns.index_add.sites import READERS, Site, is_constant, read
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten
prims = torch.ops.prims

# On a CPU a sum goes by its index as fast as by a plan.
DEVICES = ("cuda",)

# Below as many entries, launching the sort is what takes the time; with fewer rows, sums in shared memory are as fast.
LEAST_ENTRIES, LEAST_ROWS = 32768, 512

# Narrower rows are reduced so fast that no sort pays for itself.
LEAST_ROW_BYTES = 64

# Views that leave the elements in their order.
_FLAT = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)


def pays(site: Site) -> bool:
    """Whether to sort the index first: other sums of the graph go by it too, and one of all these moves wide rows."""
    tensor, entries = g.value(site.self), g.hint(g.value(site.index).numel())
    rows = g.hint(tensor.shape[site.dim])
    if tensor.device.type not in DEVICES or rows is None or entries is None:
        return False
    if rows < LEAST_ROWS or entries < max(LEAST_ENTRIES, rows):
        return False
    if not _is_wide(site) and not is_count(site):
        return False
    if any(_is_plan_of(site, node) for node in _nodes(site, INDEX_PLAN)):
        return True
    sharing = _sharing(site)
    return len(sharing) > 1 and any(map(_is_wide, sharing))


def _sharing(site: Site) -> list[Site]:
    """The sums of the graph that go by the same index, this one and those that are still to be replaced."""
    found = (read(node) for target in READERS for node in _nodes(site, target))
    return [s for s in found if isinstance(s, Site) and _same_order(s, site)]


def shared(e: Emitter, site: Site) -> fx.Node | None:
    """The plan of the site's indices: one that is there already, perhaps moved up to before this site, or a new one. None
    for a count before which the plan of a sum can't be made."""
    anchor = site.output
    for plan in _nodes(site, INDEX_PLAN):
        if not _is_plan_of(site, plan) or g.mutation_between(*sorted((plan, anchor))) is not None:
            continue
        if plan < anchor:
            return plan
        index = _base(site.index)
        if g.value(index).dim() == 1:
            arguments = (index, *plan.args[1:])
            if all(a < anchor for a in arguments if isinstance(a, fx.Node)):
                plan.args = arguments
                anchor.prepend(plan)
                return plan
    index, rows = site.index, site.self.args[0][site.dim] if site.onto_zeros else None
    if is_count(site):
        # The entries of the sum to come stand in the plan.
        site = next((s for s in _sharing(site) if _is_wide(s) and _can_be_planned_before(s, anchor)), site)
        if is_count(site):
            return None

    def flat(index: fx.Node | None) -> fx.Node | None:
        index = index and _base(index)
        return index if index is None or g.value(index).dim() == 1 else e.call(aten.reshape.default, index, [-1])

    def size(node: fx.Node) -> Any:
        rows = g.value(node).shape[site.dim]
        return rows if isinstance(rows, int) else e.call(aten.sym_size.int, node, site.dim)

    rows = size(site.self) if rows is None else rows
    return e.call(INDEX_PLAN, flat(index), rows, site.ignore, site.all_bounds, flat(site.source_index), size(site.values))


def _can_be_planned_before(site: Site, anchor: fx.Node) -> bool:
    source_index = site.source_index and _base(site.source_index)
    return (source_index is None or source_index < anchor) and isinstance(g.value(site.values).shape[site.dim], int)


def is_count(site: Site) -> bool:
    """Whether ones are added to a vector of zeros, of sizes that are known."""
    tensor, values = g.value(site.self), site.values
    if tensor.dim() != 1 or not site.onto_zeros or not is_constant(values, 1) or site.alpha != 1:
        return False
    sizes = (tensor.shape[0], g.value(site.index).numel())
    return site.weight is None and site.source_index is None and all(isinstance(s, int) for s in sizes)


def count(e: Emitter, site: Site, plan: fx.Node) -> fx.Node:
    """How many entries each row has."""
    rows, lists = g.value(site.self).shape[0], 1 if plan.args[4] is None else 2
    begin = lists * g.value(site.index).numel()
    begins = e.call(aten.slice.Tensor, plan, 0, begin, begin + rows)
    ends = e.call(aten.slice.Tensor, plan, 0, begin + 1, begin + 1 + rows)
    return e.call(prims.convert_element_type.default, e.call(aten.sub.Tensor, ends, begins), g.value(site.output).dtype)


def _nodes(site: Site, target: Any) -> list[fx.Node]:
    return site.output.graph.find_nodes(op="call_function", target=target)


def _is_wide(site: Site) -> bool:
    tensor = g.value(site.self)
    sizes = g.hints(s for d, s in enumerate(tensor.shape) if d != site.dim)
    return sizes is None or math.prod(sizes) * tensor.itemsize >= LEAST_ROW_BYTES


def _base(index: fx.Node) -> fx.Node:
    """What the index was before views that leave its elements in their order."""
    while index.op == "call_function" and index.target in _FLAT:
        index = index.args[0]
    return index


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes look at the same elements: one node, or the same views of one."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and a == b
    if a is b:
        return True
    if not (a.op == b.op == "call_function" and a.target is b.target and a.target in g.VIEWS and a.kwargs == b.kwargs):
        return False
    return len(a.args) == len(b.args) and all(map(_same, a.args, b.args))


def _same_order(a: Site, b: Site) -> bool:
    sizes = (g.value(site.self).shape[site.dim] for site in (a, b))
    if (a.bounds, a.ignore) != (b.bounds, b.ignore) or not g.same_size(*sizes) or not _same(_base(a.index), _base(b.index)):
        return False
    if is_count(a) or is_count(b):
        return True
    return a.source_strict == b.source_strict and _same_source(a, b.source_index, g.value(b.values).shape[b.dim])


def _same_source(site: Site, source_index: fx.Node | None, source_rows: Any) -> bool:
    if site.source_index is None or source_index is None:
        return site.source_index is source_index
    same_rows = g.same_size(g.value(site.values).shape[site.dim], source_rows)
    return same_rows and _same(_base(site.source_index), _base(source_index))


def _is_plan_of(site: Site, plan: fx.Node) -> bool:
    index, rows, ignore, bounds, source_index, source_rows = plan.args
    rows, source_rows = (g.value(n) if isinstance(n, fx.Node) else n for n in (rows, source_rows))
    if (ignore, bounds % SOURCE_STRICT) != (site.ignore, site.bounds) or not g.same_size(rows, g.value(site.self).shape[site.dim]):
        return False
    if not _same(_base(index), _base(site.index)):
        return False
    return is_count(site) or (bounds == site.all_bounds and _same_source(site, source_index, source_rows))
