"""What the kernels make a GPU do for a sum, and for the sort of an index: asks C++ (csrc/index_add/work.h), also where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusebackend.native import ops
from fusebackend.rewriting.device_facts import device_facts

Facts = Mapping[str, float]


def sum_facts(
    device: torch.device,
    sizes: Sequence[int],
    strides: Sequence[int],
    source_strides: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    entries: int,
    source_rows: int,
    *,
    weight: bool = False,
    source_index: bool = False,
    alpha: float = 1.0,
    leaves_out: bool = False,
    start: int = 0,
    precise: bool = False,
    deterministic: bool = False,
    planned: bool = False,
) -> Facts:
    """The facts that csrc/index_add/work.h names; none for an empty sum.

    Args:
        sizes, strides: of self; in elements.
        source_strides: of the source, of which the size along ``dim`` is ``source_rows``, or ``entries`` without a source index.
        leaves_out: whether entries may add nothing.
        start: ``ZEROS``, ``IN_PLACE`` or ``COPY`` of sites.py.
        planned: whether the sum goes by a sorted index that is there.
    """
    described = list(sizes), list(strides), list(source_strides), dim, dtype, entries, source_rows
    options = weight, source_index, float(alpha), leaves_out, start, precise, deterministic, planned
    return _sum(_described(device), *described, *options)


def sort_facts(device: torch.device, entries: int, rows: int, *, source_index: bool = False, leaves_out: bool = False) -> Facts:
    """The same for the sort of an index."""
    return _sort(_described(device), entries, rows, source_index, leaves_out)


def _described(device: torch.device) -> list[int]:
    """A GPU as csrc/index_add/bind.cpp takes it."""
    facts = device_facts(device)
    return [facts.multiprocessors, facts.capability[0], facts.shared_bytes, facts.block_shared_bytes, facts.l2_bytes]


_sum = ops.define_facts(
    "index_add_work(int[] device, int[] sizes, int[] strides, int[] source_strides, int dim, ScalarType dtype, int entries,"
    " int source_rows, bool has_weight, bool has_source_index, float alpha, bool leaves_out, int start, bool precise, bool deterministic,"
    " bool planned) -> str"
)
_sort = ops.define_facts("index_plan_work(int[] device, int entries, int rows, bool has_source_index, bool leaves_out) -> str")
