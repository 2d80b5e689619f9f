"""The operator ``fusebackend::row_scatter`` and its reference in PyTorch. The kernels are in csrc/row_scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops

#: Those that the kernels sum.
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
INDEX_DTYPES = (torch.int64, torch.int32)


def reference(source: torch.Tensor, index: torch.Tensor, bins: int, self: torch.Tensor | None = None) -> torch.Tensor:
    """What the kernels compute: ``out[r][index[r][k]] += source[r][k]`` for each row ``r`` of the last dim.

    Args:
        source: any strides; up to :func:`limits` dims, and elements of a row.
        index: int32 or int64, of the source's sizes, or 1 where it repeats. Any strides: rows of the source along dims of stride 0
            share a row of the index, too. An index out of range is an error: on CUDA a device assertion.
        bins: elements of a row of the result; not more than a row may have.
        self: what is added to, of any strides; None for zeros.

    Returns:
        A contiguous tensor. Sums are made in fp32 and rounded once. The order of the additions depends on the index alone.
    """
    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    shape = [*source.shape[:-1], bins]
    start = torch.zeros(shape, dtype=wide, device=source.device) if self is None else self.to(wide)
    return start.scatter_add(-1, index.long().expand(source.shape), source.to(wide)).to(source.dtype)


def limits() -> tuple[int, int]:
    """The most dims of a tensor, and elements of a row. Without a library, whose operators nothing calls then, any numbers will do."""
    return ops.ask("row_scatter_limits", default=(64, 1))


def _fake(source: torch.Tensor, index: torch.Tensor, bins: int, self: torch.Tensor | None = None) -> torch.Tensor:
    """Refuses what ``describe`` in csrc/row_scatter/binding.h refuses."""
    rank, (most_dims, most_row) = source.dim(), limits()
    torch._check(0 < rank <= most_dims, lambda: f"row_scatter: {rank} dimensions; 1 to {most_dims} are accepted")
    torch._check(index.dim() == rank, lambda: "row_scatter: source and index differ in rank")
    torch._check(source.dtype in DTYPES, lambda: f"row_scatter: {source.dtype} is not supported")
    torch._check(index.dtype in INDEX_DTYPES, lambda: f"row_scatter: the index is {index.dtype}, not int32 or int64")
    arguments.check_device("row_scatter", source, index=index, self=self)
    rows = [g.hint(n) for n in (bins, source.shape[-1])]
    torch._check(all(n is None or 0 <= n <= most_row for n in rows), lambda: f"row_scatter: rows may have up to {most_row} elements")
    fits = all(g.same_size(n, 1) or arguments.are_same(n, m) for n, m in zip(index.shape, source.shape))
    torch._check(fits, lambda: f"row_scatter: the index, {tuple(index.shape)}, does not broadcast to {tuple(source.shape)}")
    is_empty = g.hint(source.numel()) == 0
    torch._check(rows[0] != 0 or is_empty, lambda: "row_scatter: every index is out of range of a dimension of size 0")
    shape = [*source.shape[:-1], bins]
    if self is not None:
        fits = self.dtype == source.dtype and arguments.same_sizes(self.shape, shape)
        torch._check(fits, lambda: "row_scatter: self must have the dtype of the source and the shape of the result")
    return source.new_empty(shape)


# Implemented by csrc/row_scatter.
row_scatter = ops.define(
    "row_scatter(Tensor source, Tensor index, SymInt bins, Tensor? self=None) -> Tensor",
    fake=_fake,
    layout=torch.Tag.needs_exact_strides,
    indices={"index": "bins"},
)


def plan_facts(
    sizes: Sequence[int],
    strides: Sequence[int],
    index_sizes: Sequence[int],
    index_strides: Sequence[int],
    bins: int,
    dtype: torch.dtype,
    multiprocessors: int,
    shared_bytes: int,
    misaligned: int = 0,
) -> Mapping[str, float]:
    """How a GPU computes the sums (csrc/row_scatter/row_scatter.h, ``Plan``), for tensors that need not exist.

    Args:
        multiprocessors, shared_bytes: of the GPU, and the most shared memory that a block may have there.
        misaligned: how many bytes behind an aligned address the source begins.
    """
    return _plan(list(sizes), list(strides), list(index_sizes), list(index_strides), bins, dtype, multiprocessors, shared_bytes, misaligned)


# Implemented by csrc/row_scatter/bind.cpp. Not for graphs.
_plan = ops.define_facts(
    "row_scatter_plan(int[] sizes, int[] strides, int[] index_sizes, int[] index_strides, int bins, ScalarType dtype,"
    " int multiprocessors, int shared_bytes, int misaligned) -> str"
)


ops.define("row_scatter_limits() -> (int dims, int row)", fake=limits)
