"""Does it pay? Rules for sums by index, as they were measured on an H200 and on two CPU cores."""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add import shared_sort
from fusebackend.patterns.index_add.sites import Site
from fusebackend.rewriting.pattern import Estimate

aten = torch.ops.aten

# Where Inductor's scatter is several times slower than the kernels, whatever its neighbours are.
SLOW_SCATTER_DEVICES = ("cpu",)

# On a CPU, elements to add below which the call of an operator takes longer than Inductor's loop.
MIN_CPU_ELEMENTS = 4096

# With so many entries a row on average, atomic additions queue up, and the kernels sum in shared memory first.
CONTENDED_ENTRIES_PER_ROW = 32

# With so many entries onto a few rows, the queueing takes longer than a launch.
MIN_CONTENDED_ENTRIES = 4096

# Plain sums of these dtypes Inductor adds atomically in a Triton kernel of its own. With less than so many bytes to add, the time is
# that of the launch, and the call of an operator takes the host longer than that of a Triton kernel.
TRITON_ATOMIC_DTYPES = {torch.float64, torch.float32, torch.float16}
MIN_SOURCE_BYTES = 1 << 20

# The index is sorted for several sums only on these devices: a CPU sums by an index as fast as by a sorted one.
SORT_DEVICES = ("cuda",)

# With fewer entries, the time of the sort is that of its launches; with fewer rows, sums in shared memory are as fast.
MIN_SORT_ENTRIES, MIN_SORT_ROWS = 32768, 512

# Narrower rows are added so fast that no sort pays for itself.
MIN_SORT_ROW_BYTES = 64


def estimate(site: Site) -> Estimate:
    """Whether the kernels are faster than what Inductor makes of the sum where it stands."""
    tensor = g.value(site.self)
    if any(isinstance(size, int) and size == 0 for size in (*tensor.shape, *g.value(site.values).shape)):
        return Estimate(False, "an empty tensor: nothing to gain")
    if tensor.device.type in SLOW_SCATTER_DEVICES:
        return _is_too_small_for_a_call(site) or Estimate()
    if site.anchor.target is aten.index_add.default or torch.are_deterministic_algorithms_enabled():
        return Estimate()  # Inductor calls PyTorch's kernels
    return _costs_a_fusion(site) or _is_too_small(site) or Estimate()


def _is_too_small_for_a_call(site: Site) -> Estimate | None:
    numel = g.hint(g.value(site.values).numel())
    if numel is None or numel >= MIN_CPU_ELEMENTS:
        return None
    return Estimate(False, f"{numel} elements on a CPU: calling an operator takes as long as adding them")


def _costs_a_fusion(site: Site) -> Estimate | None:
    """Inductor computes a pointwise source inside its scatter kernel; ours needs it as a tensor, which is written and read."""
    producer = g.through_views(site.values)
    if g.value(site.anchor).dtype is torch.int64:
        return None  # Inductor calls PyTorch's kernel
    if site.source_index is not None or not g.is_fusable(producer) or producer.target is aten.full.default:
        return None
    if len(producer.users) > 1:
        return None  # it becomes a tensor anyway
    entries, rows = g.hint(site.entries), g.hint(site.rows)
    if entries is not None and rows is not None:
        if entries >= CONTENDED_ENTRIES_PER_ROW * rows:
            return None
        if site.rounded_once and rows >= entries:
            return None  # two passes over an fp32 output are saved, more than the source's
    reason = f"Inductor computes {g.describe(producer)} inside its scatter: made a tensor it would cost more than is gained"
    return Estimate(False, reason, "fused_neighbour", producer)


def _is_too_small(site: Site) -> Estimate | None:
    """A plain sum, which Inductor's kernel does as well, of so few entries that the host's time for a call counts."""
    tensor, values = g.value(site.self), g.value(site.values)
    if tensor.dtype not in TRITON_ATOMIC_DTYPES or site.onto_zeros or site.source_index is not None:
        return None
    entries, rows, numel = g.hint(site.entries), g.hint(site.rows), g.hint(values.numel())
    if entries is None or rows is None or numel is None:
        return None
    if entries >= max(CONTENDED_ENTRIES_PER_ROW * rows, MIN_CONTENDED_ENTRIES) or numel * values.itemsize >= MIN_SOURCE_BYTES:
        return None
    return Estimate(False, "so few entries that launching is what takes the time, which is quicker for a kernel of Inductor's")


def sums_to_sort_for(site: Site) -> list[Site]:
    """The sums that will go by one sorted index together with this one; empty if it does not pay to sort for this one."""
    rows, entries = g.hint(site.rows), g.hint(site.entries)
    if g.value(site.self).device.type not in SORT_DEVICES or rows is None or entries is None:
        return []
    if rows < MIN_SORT_ROWS or entries < max(MIN_SORT_ENTRIES, rows):
        return []
    if not _goes_by_a_sorted_index(site):
        return []
    sharing = shared_sort.sums_by_same_index(site)
    if shared_sort.sorted_indices(site) or (len(sharing) > 1 and any(map(_has_wide_rows, sharing))):
        return [s for s in sharing if _goes_by_a_sorted_index(s)]
    return []


def _goes_by_a_sorted_index(site: Site) -> bool:
    return _has_wide_rows(site) or shared_sort.is_count(site)


def _has_wide_rows(site: Site) -> bool:
    tensor = g.value(site.self)
    sizes = g.hints(s for d, s in enumerate(tensor.shape) if d != site.dim)
    return sizes is None or math.prod(sizes) * tensor.itemsize >= MIN_SORT_ROW_BYTES
