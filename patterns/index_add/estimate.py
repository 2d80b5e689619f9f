"""What a sum by index makes a device do: our kernels, with and without a sort that several sums share, and Inductor."""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add import shared_sort
from fusebackend.patterns.index_add.amounts import Amounts
from fusebackend.patterns.index_add.inductor_work import fused_source, inductor_work, input_bytes
from fusebackend.patterns.index_add.ops import DROP
from fusebackend.patterns.index_add.sites import COPY, IN_PLACE, ZEROS, Site
from fusebackend.patterns.index_add.work import sort_facts, sum_facts
from fusebackend.rewriting.pattern import Estimate, Match, Work, Workload
from fusebackend.rewriting.workload import alignment, log2

_QUANTITIES = ("launches", "blocks", "steps", "atomics", "queue", "scratch", "sorted", "syncs")
_ROUTES = ("tiled", "small", "wide", "fp32_copy", "few", "thread_tables", "block_tables", "buckets", "segments")
# The routes that copy self, or fill it with zeros, before they add to it. The others write each row once.
_ADD_TO_A_COPY = ("tiled", "small", "wide", "few")


def estimate(match: Match, alone: Match | None) -> Estimate | list[Workload]:
    """The work of a match both ways.

    Args:
        alone: the same without the sort that the sum shares with others; None where there is none.
    """
    site: Site = match.site
    tensor = g.value(site.self)
    if any(isinstance(size, int) and size == 0 for size in (*tensor.shape, *g.value(site.values).shape)):
        return Estimate(False, "an empty tensor: nothing to gain")
    amounts = Amounts.of(site)
    if amounts is None:
        return Estimate(None, "a size depends on data, so it is not known whether the sum pays", "unmeasured", instead=alone)
    if amounts.elements == 0 or amounts.rows == 0:
        return Estimate(False, "an empty tensor: nothing to gain")
    theirs, producer = inductor_work(site, amounts), fused_source(site)
    loops = () if producer is None else (Work(f"stream{amounts.suffix}", {"bytes": input_bytes(producer) + amounts.entry_bytes}),)
    found = []
    if site.sharing:
        found.append(Workload((*_planned(site, amounts), *loops), theirs, producer))
    if alone is not None or not site.sharing:
        found.append(Workload((_sum(site, amounts), *loops), theirs, producer, alone))
    return found


def _planned(site: Site, amounts: Amounts) -> tuple[Work, ...]:
    """By a sorted index. Those that share it each pay a part of the sort, if it is not there yet."""
    sort: tuple[Work, ...] = ()
    if shared_sort.standing_sorted_index(site) is None:
        sort = (_sort(site, amounts, 1 / len(site.sharing)),)
    if shared_sort.is_count(site):  # the difference of two lists
        return (*sort, Work(f"stream{amounts.suffix}", {"bytes": amounts.rows * (2 * 4 + amounts.itemsize)}))
    return (*sort, _sum(site, amounts, planned=True))


def _leaves_out(site: Site) -> bool:
    return site.bounds == DROP or site.ignore is not None


def _sort(site: Site, amounts: Amounts, share: float) -> Work:
    giver = next((s for s in site.sharing if not shared_sort.is_count(s)), site)  # of a count, the sums' source rows are sorted with it
    gathers = giver.source_index is not None
    words = float(amounts.entries * (2 if gathers else 1) + amounts.rows)
    quantities = {"read": float(amounts.entries * (16 if gathers else 8)), "written": 4 * words}
    shape = {"entries": log2(amounts.entries), "rows": log2(amounts.rows), "gathers": float(gathers), "dynamic": float(amounts.dynamic)}
    if amounts.suffix:
        return Work("index_plan cpu", quantities, shape, share)
    facts = sort_facts(g.value(site.self).device, amounts.entries, amounts.rows, source_index=gathers, leaves_out=_leaves_out(site))
    quantities |= {name: facts[name] for name in ("launches", "blocks", "scratch", "sorted", "syncs")}
    return Work("index_plan", quantities, {**shape, "radix": float(facts["syncs"] > 0)}, share)


def _sum(site: Site, amounts: Amounts, planned: bool = False) -> Work:
    tensor = g.value(site.self)
    quantities = {"read": amounts.source_bytes + amounts.index_bytes, "written": 0.0, "gathered": amounts.gathered_bytes}
    shape = {
        **amounts.shape(),
        "row alignment": alignment(int(amounts.row_bytes)),
        "zeros": float(site.start == ZEROS),
        "copies": float(site.start == COPY),
        "weighs": float(site.weight is not None or site.alpha != 1),
        "floating": float(tensor.is_floating_point()),
    }
    if amounts.suffix:
        whole = 0.0 if site.start == IN_PLACE else amounts.out_bytes
        quantities["read"] += amounts.touched_bytes + (whole if site.start == COPY else 0.0)
        quantities["written"] += amounts.touched_bytes + whole
        quantities["adds"] = amounts.elements
        quantities["entries"] = float(amounts.entries)
        more = {"planned": float(planned), "precise": float(site.precise), "threads": log2(torch.get_num_threads())}
        return Work("index_add cpu", quantities, {**shape, **more})
    facts = _facts(site, amounts, planned)
    adds_to_copy = any(facts[route] for route in _ADD_TO_A_COPY)
    whole, touched = amounts.out_bytes, amounts.touched_bytes
    if site.start == IN_PLACE:
        read, written = touched, touched
    elif adds_to_copy:
        read, written = touched + (whole if site.start == COPY else 0.0), touched + whole
    else:
        read, written = (whole if site.start == COPY else 0.0), whole
    quantities["read"] += read
    quantities["written"] += written
    quantities |= {name: facts[name] for name in _QUANTITIES}
    shape |= {name.replace("_", " "): facts[name] for name in _ROUTES}
    shape |= {"vector": log2(facts["vector"]), "planned": float(planned)}
    return Work("index_add", quantities, shape)


def _facts(site: Site, amounts: Amounts, planned: bool):
    tensor, values = g.value(site.self), g.value(site.values)
    sizes, strides, source_strides = (g.hints(x) or [] for x in (tensor.shape, tensor.stride(), values.stride()))
    if site.index_dims != 1 or site.onto_zeros:  # reshaped to one, or contiguous
        strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    if site.index_dims != 1:
        source_strides = strides
    if amounts.is_constant:  # one element, expanded
        source_strides = [0] * len(sizes)
    return sum_facts(
        tensor.device,
        sizes,
        strides,
        source_strides,
        site.dim,
        g.value(site.output).dtype,
        amounts.entries,
        amounts.source_rows,
        weight=site.weight is not None,
        source_index=site.source_index is not None,
        alpha=site.alpha,
        leaves_out=_leaves_out(site),
        start=site.start,
        precise=site.precise,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        planned=planned,
    )
