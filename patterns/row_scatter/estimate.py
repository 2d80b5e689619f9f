"""What a sum along rows by an index makes a device do: in our kernels, and in Inductor's scatter.

Inductor computes the source inside its scatter, fills the result with zeros before, and adds each element atomically. Here the source is a
tensor: what computes it writes it.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add.amounts import Amounts
from fusebackend.patterns.index_add.inductor_work import input_bytes, queue, swaps
from fusebackend.patterns.row_scatter.ops import plan_facts
from fusebackend.patterns.row_scatter.sites import Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import alignment, log2, stream

aten = torch.ops.aten

_SECTOR = 32  # bytes that a GPU's memory moves at once


def estimate(site: Site) -> Estimate | Workload:
    source, out = g.value(site.source), g.value(site.node)
    sizes, strides, index_strides, bins = (
        g.hints(source.shape),
        g.hints(source.stride()),
        g.hints(site.index_strides()),
        g.hint(site.bins),
    )
    if sizes is None or strides is None or index_strides is None or bins is None:
        return Estimate(None, "a size depends on data, so it is not known whether the sum pays", "unmeasured")
    if 0 in sizes or bins == 0:
        return Estimate(False, "an empty tensor: nothing to gain")
    producer = _fused_source(site)
    ours = [_ours(site, sizes, strides, index_strides, bins)]
    if producer is not None:
        ours.append(stream(producer))
    quantities, shape = _amounts(site, sizes, index_strides, bins)
    read = float(math.prod(sizes) * source.itemsize) if producer is None else input_bytes(producer)
    inductor = _inductor(site, out, read, float(math.prod(sizes)), quantities, shape)
    return Workload(tuple(ours), (inductor,), producer)


def _fused_source(site: Site) -> fx.Node | None:
    """The node that Inductor computes inside its scatters, and that must become a tensor for the kernel, if there is one."""
    producer = g.through_views(site.source)
    if not g.is_fusable(producer) or producer.target is aten.full.default:
        return None
    return producer if all(map(g.is_fusable, g.consumers(producer))) else None  # otherwise it is one anyway


def _amounts(site: Site, sizes: list[int], index_strides: list[int], bins: int) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape that both descriptions share."""
    source, out = g.value(site.source), g.value(site.node)
    rows = math.prod(sizes[:-1])
    copies = math.prod(n for n, s in zip(sizes[:-1], index_strides) if s == 0)
    index_bytes = rows // copies * (sizes[-1] if index_strides[-1] else 1) * g.value(site.index).itemsize
    quantities = {"index": float(index_bytes), "written": float(rows * bins * out.itemsize)}
    shape = {
        "rows": log2(rows),
        "sources": log2(sizes[-1]),
        "bins": log2(bins),
        "copies": log2(copies),
        "element": log2(source.itemsize),
        "onto zeros": float(site.onto_zeros),
        "dynamic": float(not all(isinstance(n, int) for n in (*source.shape, *source.stride(), *out.shape))),
    }
    return quantities, shape


def _ours(site: Site, sizes: list[int], strides: list[int], index_strides: list[int], bins: int) -> Work:
    source, out = g.value(site.source), g.value(site.node)
    quantities, shape = _amounts(site, sizes, index_strides, bins)
    elements = float(math.prod(sizes))
    quantities |= {
        "read": elements * source.itemsize,
        "added to": 0.0 if site.onto_zeros else quantities["written"],
        "adds": elements,
    }
    if out.device.type == "cpu":
        quantities["bins"] = float(math.prod(sizes[:-1]) * bins)
        return Work("row_scatter cpu", quantities, {**shape, "threads": log2(torch.get_num_threads())})
    index_sizes = [n if s else 1 for n, s in zip(sizes, index_strides)]
    misaligned = (g.hint(source.storage_offset()) or 0) * source.itemsize % 16
    gpu = device_facts(out.device)
    strides_of_index = [s or 1 for s in index_strides]
    facts = plan_facts(
        sizes, strides, index_sizes, strides_of_index, bins, source.dtype, gpu.multiprocessors, gpu.block_shared_bytes, misaligned
    )
    if not facts["coalesced"]:  # each element is in another sector
        quantities["read"] = elements * min(_SECTOR, strides[-1] * source.itemsize or source.itemsize)
    lists = facts["blocks"] * facts["tile_rows"] / max(facts["index_rows"], 1.0)  # how often each sorted row is read, from the L2 cache
    quantities |= {
        "sorted": facts["index_rows"] * sizes[-1],
        "lists": facts["workspace_bytes"] * lists,
        "sort blocks": facts["index_rows"],
        "blocks": facts["blocks"],
        "launches": 2.0,
    }
    shape |= {name: facts[name] for name in ("along", "across")}
    shape |= {"group": log2(facts["group"]), "tile rows": log2(facts["tile_rows"]), "shared": log2(facts["shared_bytes"])}
    return Work("row_scatter", quantities, shape)


def _inductor(site: Site, out: torch.Tensor, read: float, elements: float, quantities: dict[str, float], shape: dict[str, float]) -> Work:
    """A fill, or a copy of what is added to, and a scatter behind it. A 16-bit number is added by exchanging it, which is repeated where
    another thread was faster."""
    more = {
        "read": read,
        "copied": 0.0 if site.onto_zeros else quantities["written"],
        "atomics": elements,
        "exchanges": elements if out.itemsize == 2 else 0.0,
        "launches": 2.0,
    }
    suffix = " cpu" if out.device.type == "cpu" else ""
    return Work(
        f"inductor row scatter{suffix}", {**quantities, **more}, shape, otherwise=_scatter_of_elements(site, read, quantities, shape)
    )


def _scatter_of_elements(site: Site, read: float, quantities: dict[str, float], shape: dict[str, float]) -> Work:
    """The same as a scatter of single elements to any places, of which calibrations of the family index_add know. Of an index that goes up
    along a row this says too much: elements that lie beside one another are then added together."""
    source, out = g.value(site.source), g.value(site.node)
    elements, rows = math.prod(g.hints(source.shape) or [0]), math.prod(g.hints(out.shape) or [0])
    suffix = " cpu" if out.device.type == "cpu" else ""
    a = Amounts(rows, 1, elements, elements, out.itemsize, quantities["index"], False, False, bool(shape["dynamic"]), suffix)
    fills, copies = float(site.onto_zeros), float(not site.onto_zeros)
    amounts = {
        "read": read + quantities["index"] + a.touched_bytes + copies * a.out_bytes,
        "written": a.touched_bytes + (fills + copies) * a.out_bytes,
        "gathered": 0.0,
        "atomics": a.elements,
        "queue": queue(a),
        "sectors": a.sectors,
        "swaps": swaps(a, out.device, in_pairs=False),
        "launches": 1 + fills + copies,
    }
    more = {
        "row alignment": alignment(int(a.row_bytes)),
        "bf16": float(out.dtype is torch.bfloat16),
        "fills": fills,
        "copies": copies,
        "fused source": float(_fused_source(site) is not None),
        "deterministic": float(torch.are_deterministic_algorithms_enabled()),
    }
    return Work(f"inductor scatter{suffix}", amounts, {**a.shape(), **more})
