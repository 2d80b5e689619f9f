"""What a sum over outer dims makes a device do: in the kernels, and in Inductor's.

Inductor computes what is summed inside its sum, and divides long sums among more threads by a second kernel. It does not where it can't
tell how the loads go on along the sum, that is behind indirect loads: then only the columns are shared out, and each block walks over all
rows.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.ops import plan_facts
from fusebackend.patterns.column_sum.producers import Producer, producer_of
from fusebackend.patterns.column_sum.sites import Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Generated, Work, Workload
from fusebackend.rewriting.workload import log2, log2_run, stream


def estimate(site: Site) -> Estimate | Workload:
    value = g.value(site.source)
    sizes, strides = (g.hints([of[d] for d in site.order]) for of in (value.shape, value.stride()))
    if sizes is None or strides is None:
        return Estimate(None, "a size depends on data, so it is not known whether the sum pays", "unmeasured")
    if 0 in sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    producer = producer_of(site.source)
    neighbours = [] if producer.nodes else _fused_neighbours(site)
    ours = [_ours(site, sizes, strides), *map(stream, neighbours)]
    if producer.nodes:
        ours.append(_materialised(site, sizes, producer))
    shown = producer.nodes[-1] if producer.nodes else neighbours[0] if neighbours else None
    return Workload(tuple(ours), (_inductor(site, sizes, producer),), shown)


def _inductor(site: Site, sizes: list[int], producer: Producer) -> Work | Generated:
    """Of what is computed inside the sum, Inductor is asked. Of gathers its code tells which rows a block reads only once it runs: they are
    described, and so is what is only read."""
    described = _described(site, sizes, producer)
    if not producer.nodes or producer.is_indirect or g.value(site.node).device.type == "cpu":
        return described
    return Generated((*producer.nodes, *_casts(site), site.node), (site.node,), described)


def _casts(site: Site) -> list[fx.Node]:
    """Those between what is summed and the sum."""
    found: list[fx.Node] = []
    node = g.arguments(site.node)["self"]
    while node is not site.source:
        found.insert(0, node)
        node = node.args[0]
    return found


def _fused_neighbours(site: Site) -> list[fx.Node]:
    """Nodes that compute the summed tensor for other users too, none of which needs it as a tensor: ours makes it one."""
    source = g.through_views(site.source)
    if not g.is_fusable(source):
        return []
    others = [u for u in g.consumers(source) if u is not site.node]
    return [source] if all(map(g.is_fusable, others)) else []


def _facts(site: Site, sizes: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape that all descriptions share."""
    value, out = g.value(site.source), g.value(site.node)
    rows, columns = (float(math.prod(sizes[a:b])) for a, b in ((site.begin, site.end), (site.end, len(sizes))))
    batch = float(math.prod(sizes[: site.begin]))
    quantities = {"written": batch * columns * out.itemsize}
    is_dynamic = not all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return quantities, _shape(batch, rows, columns, value.dtype, is_dynamic)


def _ours(site: Site, sizes: list[int], strides: list[int]) -> Work:
    value, out = g.value(site.source), g.value(site.node)
    quantities, shape = _facts(site, sizes)
    elements = float(math.prod(sizes))
    quantities["read"] = elements * value.itemsize
    if value.device.type == "cpu":
        return Work("column_sum cpu", {**quantities, "elements": elements}, {**shape, "threads": log2(torch.get_num_threads())})
    misaligned = (g.hint(value.storage_offset()) or 0) * value.itemsize % 16
    multiprocessors = device_facts(value.device).multiprocessors
    facts = plan_facts(sizes, strides, site.begin, site.end, value.dtype, out.dtype, multiprocessors, misaligned)
    sums = facts["partials"] * (8 if torch.float64 in (value.dtype, out.dtype) else 4)
    quantities |= {
        "partial": 2 * sums,
        "blocks": facts["blocks"],
        "loads": elements * value.itemsize / facts["vector_bytes"],
        "launches": 1.0 + (sums > 0),
    }
    shape |= {name.replace("_", " "): log2(facts[name]) for name in ("vector_bytes", "width", "lanes", "threads", "splits", "blocks")}
    return Work("column_sum", quantities, shape)


def _materialised(site: Site, sizes: list[int], producer: Producer) -> Work:
    """The kernel that computes what is summed."""
    value = g.value(site.source)
    _, shape = _facts(site, sizes)
    written = float(math.prod(sizes) * value.itemsize)
    suffix = " cpu" if value.device.type == "cpu" else ""
    return Work(f"column_sum input{suffix}", {"bytes": producer.read + written, "gathered": producer.gathered}, shape)


def _described(site: Site, sizes: list[int], producer: Producer) -> Work:
    """Inductor's sum, by what it reads and computes."""
    value = g.value(site.source)
    quantities, shape = _facts(site, sizes)
    elements = float(math.prod(sizes))
    read = producer.read if producer.nodes else elements * value.itemsize
    computed = float(sum(not g.is_view(n) for n in producer.nodes))
    quantities |= {"read": read, "gathered": producer.gathered, "computed": elements * computed, "launches": 1.0}
    shape |= {"nodes": log2(1 + computed), "gathers": float(producer.is_indirect)}
    if value.device.type == "cpu":
        quantities["elements"] = elements
        return Work("inductor column sum cpu", quantities, {**shape, "threads": log2(torch.get_num_threads())})
    if producer.is_indirect:
        # Not divided: one row after the other, by as many threads as there are columns. More columns than threads run at once take turns.
        threads = device_facts(value.device).multiprocessors * 2048
        rows = float(math.prod(sizes[site.begin : site.end]))
        quantities["steps"] = rows * max(1.0, elements / rows / threads)
    return Work("inductor column sum", quantities, shape)


def sum_over_rows(batch: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device, is_dynamic: bool) -> Work:
    """What Inductor makes of the sum over the rows of ``batch`` contiguous matrices, which are in memory."""
    read, written = (float(batch * n * columns * dtype.itemsize) for n in (rows, 1))
    if device.type == "cpu":
        return Work("stream cpu", {"bytes": read + written}, {"log2 itemsize": log2(dtype.itemsize)})
    shape = _shape(batch, rows, columns, dtype, is_dynamic) | {"nodes": 0.0, "gathers": 0.0}
    quantities = {"written": written, "read": read, "gathered": 0.0, "computed": 0.0, "launches": 1.0}
    return Work("inductor column sum", quantities, shape)


def _shape(batch: float, rows: float, columns: float, dtype: torch.dtype, is_dynamic: bool) -> dict[str, float]:
    return {
        "rows": log2(rows),
        "columns": log2(columns),
        "batch": log2(batch),
        "log2 itemsize": log2(dtype.itemsize),
        "row": log2_run(columns * dtype.itemsize),
        "dynamic": float(is_dynamic),
    }
