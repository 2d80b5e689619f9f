"""What Inductor makes of a sum by index: a scatter of its own, or a call of PyTorch's kernel, with the copies and fills before it."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add.amounts import Amounts
from fusebackend.patterns.index_add.sites import IN_PLACE, Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import alignment

aten = torch.ops.aten

_THREADS, _LANES = 2048, 32  # that a multiprocessor runs at once, and those of a warp
_SCATTERS = (aten.scatter_add.default, aten.scatter_reduce.two)
# These are done in place where nobody needs the old value; of the others' self Inductor makes a copy.
_REINPLACED = (aten.index_put.default, aten._unsafe_index_put.default)


def library_kernel(site: Site) -> str | None:
    """The PyTorch kernel that Inductor calls for a sum; None where it generates a scatter."""
    from torch._inductor import utils

    target, dtype = site.anchor.target, g.value(site.anchor).dtype
    if target is aten.index_add.default:  # it is decomposed, but for what it would be wrong or slow for
        return "aten index_put" if torch.are_deterministic_algorithms_enabled() else "aten index_add"
    if target in _SCATTERS:
        device = g.value(site.anchor).device.type
        falls_back = utils.use_scatter_fallback(aten.scatter_reduce_.two, "sum", dtype, dtype, device, True)
        return "aten scatter_add" if falls_back else None
    falls_back = torch.are_deterministic_algorithms_enabled() or utils.needs_fallback_due_to_atomic_add_limitations(dtype)
    return "aten index_put" if falls_back else None


def fused_source(site: Site) -> fx.Node | None:
    """The pointwise node that Inductor computes inside its scatter, and that must become a tensor for the kernels, if there is one."""
    producer = g.through_views(site.values)
    if library_kernel(site) or site.source_index is not None or not g.is_fusable(producer) or producer.target is aten.full.default:
        return None
    return producer if len(producer.users) == 1 else None  # otherwise it becomes a tensor anyway


def input_bytes(node: fx.Node) -> float:
    """Of the tensors that a node reads."""
    return float(sum(g.value(i).itemsize * (g.hint(g.value(i).numel()) or 0) for i in node.all_input_nodes if g.is_tensor(i)))


def inductor_work(site: Site, amounts: Amounts) -> tuple[Work, ...]:
    """The work of the nodes that the site's match replaces."""
    a = dataclasses.replace(amounts, itemsize=g.value(site.anchor).itemsize)  # a sum that is rounded once is of fp32 until then
    library, producer = library_kernel(site), fused_source(site)
    before: tuple[Work, ...] = ()
    source = amounts.source_bytes if producer is None else input_bytes(producer)
    if library and (site.source_index is not None or site.weight is not None):  # makes a tensor of what the kernels look up as they read
        before = (Work(f"stream{a.suffix}", {"bytes": amounts.source_bytes + amounts.index_bytes + a.entry_bytes}),)
        source = a.entry_bytes
    fills, copies = float(site.onto_zeros), _copies(site, library)
    quantities = {
        "read": source + amounts.index_bytes + a.touched_bytes + copies * a.out_bytes,
        "written": a.touched_bytes + (fills + copies) * a.out_bytes,
        "gathered": 0.0 if library else a.gathered_bytes,
        "atomics": a.elements,
        "queue": queue(a),
        "sectors": a.sectors,
        "swaps": 0.0 if library else swaps(a, g.value(site.anchor).device, in_pairs=_in_pairs(site)),
        "launches": 1 + fills + copies + site.rounded_once,
    }
    if site.rounded_once:
        quantities["read"] += a.out_bytes
        quantities["written"] += amounts.out_bytes
    shape = {
        **a.shape(),
        "row alignment": alignment(int(a.row_bytes)),
        "bf16": float(g.value(site.anchor).dtype is torch.bfloat16),
        "fills": fills,
        "copies": copies,
        "fused source": float(producer is not None),
        "deterministic": float(torch.are_deterministic_algorithms_enabled()),
    }
    return (*before, Work(f"{library or 'inductor scatter'}{a.suffix}", quantities, shape))


def _copies(site: Site, library: str | None) -> float:
    """How often all of self is copied."""
    if site.onto_zeros:
        return float(library == "aten index_add")  # which returns a new tensor
    if site.start == IN_PLACE and site.anchor.target in _REINPLACED:
        return 0.0
    is_written_back = any(u.target is aten.copy_.default and u.args[0] is site.self for u in site.self.users)
    return 1.0 + is_written_back


def _in_pairs(site: Site) -> bool:
    """Whether what is added to neighbours in memory lies side by side, or is one number: Inductor's loop follows the source, which may be a
    view. The gradient of a table of biases is read head by head, while the table has the heads of a position side by side."""
    return site.dim < g.value(site.self).dim() - 1 and g.hint(g.value(site.values).stride(-1)) in (0, 1)


def swaps(a: Amounts, device: torch.device, *, in_pairs: bool) -> float:
    """Compare-and-swap operations: Triton adds 16 bits so, but for aligned pairs. Of the threads that meet at an address, one succeeds."""
    if a.itemsize != 2 or (in_pairs and a.row_bytes % 4 == 0) or a.suffix:
        return 0.0
    threads = device_facts(device).multiprocessors * _THREADS
    meeting = max(min(a.contention, threads / (a.rows * a.columns)), 1.0)
    most = max(min(a.entries * a.largest_share, threads * a.largest_share / a.columns), 1.0)
    return a.elements * (a.largest_share * most + (1 - a.largest_share) * meeting)


def queue(a: Amounts) -> float:
    """Warps that add to one address, that which most do: the lanes of one that do are combined."""
    entries = max(_LANES / a.columns, 1.0)
    return max(a.entries / entries * -math.expm1(-entries * a.largest_share), 1.0)
