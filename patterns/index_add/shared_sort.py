"""One sort of an index for all sums of a graph that go by it: the layers of a graph network, and their counts.

    scatter_add(full(0), 0, expand(view(dst)), index(x, [src]))   ->  plan = index_plan(dst, rows, source_index=src)
    scatter_add(full(0), 0, dst, full(1))                             index_add_zeros(rows, 0, dst, x, source_index=src, plan=plan)
                                                                      plan[begins + 1] - plan[begins]
By a sorted index each row of the output is written once, rounded once, without atomic additions. A count is the difference
between where the rows' entries begin.

Here is how sums that share an index are found, and how the sort is inserted; whether that pays, estimate.py says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add.ops import INDEX_PLAN, SOURCE_STRICT
from fusebackend.patterns.index_add.sites import READERS, Site, is_constant, read
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten
prims = torch.ops.prims

# Views that leave the elements in their order.
_FLATTENING = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)


# Sorted indices count in 32 bits.
_MAX_SORTABLE = 2**31 - 2


def sums_that_may_share(site: Site) -> list[Site]:
    """The sums of the graph that may go by one sorted index, this one and others that are still to be replaced; empty if none is to share
    it with, or if a size is known at run time only."""
    sizes = [g.hint(site.rows), g.hint(site.entries), g.hint(_source_rows(site))]
    if any(n is None or n > _MAX_SORTABLE for n in sizes):
        return []
    memory = g.through_views(site.index)
    nodes = (n for target in READERS for n in _nodes(site, target) if memory in map(g.through_views, n.all_input_nodes))
    sharing = [s for s in map(read, nodes) if isinstance(s, Site) and _same_order(s, site)]
    shared = len(sharing) > 1 and not all(map(is_count, sharing))  # which would not say what else to sort
    return sharing if shared or sorted_indices(site) else []


def _source_rows(site: Site) -> Any:
    """Of what is added: a source of an index without dims, or of several, is reshaped to rows."""
    return g.value(site.values).shape[site.dim] if site.index_dims == 1 else site.entries


def sorted_indices(site: Site) -> list[fx.Node]:
    """The calls of ``index_plan`` in the graph by which the sum could go, wherever they stand."""
    return [node for node in _nodes(site, INDEX_PLAN) if _is_of(site, node)]


def is_count(site: Site) -> bool:
    """Whether ones are added to a vector of zeros, of sizes that are known."""
    tensor, values = g.value(site.self), site.values
    if tensor.dim() != 1 or not site.onto_zeros or not is_constant(values, 1) or site.alpha != 1:
        return False
    return site.weight is None and site.source_index is None and isinstance(site.rows, int) and isinstance(site.entries, int)


def standing_sorted_index(site: Site) -> fx.Node | None:
    """A sorted index for the sum that stands before it."""
    anchor = site.output
    return next((n for n in sorted_indices(site) if n < anchor and g.mutation_between(n, anchor) is None), None)


def emit_sorted_index(e: Emitter, site: Site) -> fx.Node | None:
    """A sorted index for the sum: one that stands before it, or a new one. None where none can be computed before it.

    A new one goes right before the first of the sums that share it, as far as its inputs are there, so that those find it.
    """
    anchor, standing = site.output, standing_sorted_index(site)
    if standing is not None:
        return standing
    places = sorted({s.output for s in site.sharing if s.output < anchor} | {anchor})
    # A count goes by any sorted index, but the sums need their source rows in it.
    for giver in [s for s in site.sharing if not is_count(s)] if is_count(site) else [site]:
        inputs = _inputs(giver)
        for place in places:
            if all(i < place for i in inputs) and g.mutation_between(place, anchor) is None:
                return _emit(e.before(place), giver)
    return None


def emit_count(e: Emitter, site: Site, sorted_index: fx.Node) -> fx.Node:
    """How many entries each row has."""
    rows, lists = site.rows, 1 if sorted_index.args[4] is None else 2
    begin = lists * site.entries
    begins = e.call(aten.slice.Tensor, sorted_index, 0, begin, begin + rows)
    ends = e.call(aten.slice.Tensor, sorted_index, 0, begin + 1, begin + 1 + rows)
    return e.call(prims.convert_element_type.default, e.call(aten.sub.Tensor, ends, begins), g.value(site.output).dtype)


def _inputs(site: Site) -> list[fx.Node]:
    """The nodes that ``_emit`` reads."""
    found = [_base(site.index), None if site.source_index is None else _base(site.source_index)]
    found.append(site.self.args[0][site.dim] if site.onto_zeros else _if_symbolic(site.self, site.dim))
    found.append(_if_symbolic(site.values, site.dim))
    return [n for n in found if isinstance(n, fx.Node)]


def _if_symbolic(node: fx.Node, dim: int) -> fx.Node | None:
    """The node, if its size along ``dim`` must be asked for in the graph."""
    return None if isinstance(g.value(node).shape[dim], int) else node


def _emit(e: Emitter, site: Site) -> fx.Node:
    def flat(index: fx.Node | None) -> fx.Node | None:
        index = index and _base(index)
        return index if index is None or g.value(index).dim() == 1 else e.call(aten.reshape.default, index, [-1])

    def size(node: fx.Node) -> Any:
        return e.call(aten.sym_size.int, node, site.dim) if _if_symbolic(node, site.dim) else g.value(node).shape[site.dim]

    rows = site.self.args[0][site.dim] if site.onto_zeros else size(site.self)
    return e.call(INDEX_PLAN, flat(site.index), rows, site.ignore, site.all_bounds, flat(site.source_index), size(site.values))


def _nodes(site: Site, target: Any) -> list[fx.Node]:
    return site.output.graph.find_nodes(op="call_function", target=target)


def _base(index: fx.Node) -> fx.Node:
    """What the index was before views that leave its elements in their order."""
    while index.op == "call_function" and index.target in _FLATTENING:
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
    """Whether two sums take the same entries in the same order."""
    if (a.bounds, a.ignore) != (b.bounds, b.ignore) or not g.same_size(a.rows, b.rows) or not _same(_base(a.index), _base(b.index)):
        return False
    if is_count(a) or is_count(b):
        return True
    return a.source_strict == b.source_strict and _same_source(a, b.source_index, _source_rows(b))


def _same_source(site: Site, source_index: fx.Node | None, source_rows: Any) -> bool:
    if site.source_index is None or source_index is None:
        return site.source_index is source_index
    same_rows = g.same_size(_source_rows(site), source_rows)
    return same_rows and _same(_base(site.source_index), _base(source_index))


def _is_of(site: Site, sorted_index: fx.Node) -> bool:
    index, rows, ignore, bounds, source_index, source_rows = sorted_index.args
    rows, source_rows = (g.value(n) if isinstance(n, fx.Node) else n for n in (rows, source_rows))
    if (ignore, bounds % SOURCE_STRICT) != (site.ignore, site.bounds) or not g.same_size(rows, site.rows):
        return False
    if not _same(_base(index), _base(site.index)):
        return False
    return is_count(site) or (bounds == site.all_bounds and _same_source(site, source_index, source_rows))
