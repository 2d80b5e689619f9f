"""What variances and means over outer dims make a device do: in the kernels, and in Inductor's.

Inductor's loop divides once for every element (Welford's way), and computes what it reads inside the loop.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_moments.sites import Site
from fusebackend.patterns.column_sum.ops import plan_facts, wide_dtype
from fusebackend.patterns.column_sum.producers import producer_of
from fusebackend.patterns.column_sum.work import contiguous, is_dynamic, planned_work, shape_of
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import alignment, log2, stream, streamed


def estimate(site: Site) -> Estimate | Workload:
    value = g.value(site.source)
    sizes, strides = (g.hints([of[d] for d in site.order]) for of in (value.shape, value.stride()))
    if sizes is None or strides is None:
        return Estimate(None, "a size depends on data, so it is not known whether it pays", "unmeasured")
    if 0 in sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    if site.is_relaid:
        strides = contiguous(sizes)
    ours = [_ours(site, sizes, strides)]
    neighbours = []
    reader = _fused_reader(site)
    if reader is not None:  # what reads the results becomes a kernel of its own
        neighbours.append(reader)
        ours.append(streamed(2.0 * ours[0].quantities["written"], value))
    producer = producer_of(site.source)
    source = g.through_views(site.source)
    if producer.nodes or (g.is_fusable(source) and all(map(g.is_fusable, g.consumers(source)))):  # becomes a tensor
        neighbours.append(source)
        ours.append(stream(source))
    orders = {site.source: site.order} if site.is_relaid else {}
    return Workload(tuple(ours), (_inductor(site, sizes),), neighbours[-1] if neighbours else None, orders=orders)


def _fused_reader(site: Site) -> fx.Node | None:
    """A node that Inductor computes at the end of the kernel that finishes the results."""
    readers = (reader for result in site.outputs for reader in g.consumers(result))
    return next((n for n in readers if g.is_fusable(n)), None)


def _facts(site: Site, sizes: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape that both descriptions share."""
    value = g.value(site.source)
    kept = math.prod([*sizes[: site.begin], *sizes[site.end :]])
    quantities = {"read": float(math.prod(sizes)) * value.itemsize, "written": float(len(site.outputs) * kept * site.dtype.itemsize)}
    return quantities, shape_of(sizes, site.begin, site.end, value.dtype, is_dynamic(value))


def _ours(site: Site, sizes: list[int], strides: list[int]) -> Work:
    value = g.value(site.source)
    quantities, shape = _facts(site, sizes)
    elements = float(math.prod(sizes))
    if value.device.type == "cpu":
        return Work("column_moments cpu", {**quantities, "elements": elements}, {**shape, "threads": log2(torch.get_num_threads())})
    misaligned = (g.hint(value.storage_offset()) or 0) * value.itemsize % 16
    multiprocessors = device_facts(value.device).multiprocessors
    facts = plan_facts(sizes, strides, site.begin, site.end, value.dtype, site.dtype, multiprocessors, misaligned, moments=True)
    wide = wide_dtype(value.dtype, site.dtype).itemsize
    planned, laid_out = planned_work(facts, quantities["read"], 4 * facts["partials"] * wide)  # means and squares, written and read
    return Work("column_moments", {**quantities, "elements": elements * wide / 4, **planned}, shape | laid_out)


def _inductor(site: Site, sizes: list[int]) -> Work:
    """Inductor's loop. What is computed inside it is left out: batch norm follows convolutions and sums that are there."""
    value = g.value(site.source)
    quantities, shape = _facts(site, sizes)
    quantities |= {"elements": float(math.prod(sizes)), "launches": 1.0}
    if value.device.type == "cpu":
        return Work("inductor column moments cpu", quantities, {**shape, "threads": log2(torch.get_num_threads())})
    # Inductor divides rows among threads evenly where it can, and masks what lies beyond otherwise.
    rows = math.prod(sizes[site.begin : site.end])
    shape |= {"double": float(site.dtype is torch.float64), "even rows": alignment(rows)}
    return Work("inductor column moments", quantities, shape)
