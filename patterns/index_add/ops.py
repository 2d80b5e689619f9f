"""The operators of the family ``index_add``: schemas, fakes, and what they compute in plain PyTorch."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend.native import loader, ops

#: What an index outside [0, rows) means: an error; counted from the end (``index_put``); adds nothing (embedding backward).
STRICT, WRAP, DROP = 0, 1, 2

#: Added to one of these: a negative source index is an error too, as in a gather. Without it, it counts from the end.
SOURCE_STRICT = 4

DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
HALVES = {torch.float16, torch.bfloat16}

_OPTIONS = (
    "int dim, Tensor index, Tensor source, Tensor? weight, Tensor? source_index, float alpha, int? ignore_index,"
    " int bounds, bool precise, bool deterministic, Tensor? plan=None"
)


def reference(
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor | None = None,
    source_index: torch.Tensor | None = None,
    alpha: float = 1.0,
    ignore_index: int | None = None,
    bounds: int = STRICT,
) -> torch.Tensor:
    """What ``fusebackend::index_add`` computes, rounded once from a sum in float64 (integers: in int64).

    Args:
        self: any shape; what is added to.
        dim: the indexed dimension of self and source.
        index: (n,) int32 or int64, the row of self that each entry is added to.
        source: as self but for ``dim``, which has n entries, or any number with ``source_index``.
        weight: (n,) factors, in source's dtype.
        source_index: (n,) int32 or int64; entry k is row ``source_index[k]`` of source. Negative: from the end.
        ignore_index: entries with this index add nothing.
        bounds: STRICT, WRAP or DROP, plus SOURCE_STRICT or not.

    The operators also take

        precise: sum 16-bit floats in fp32 and round once; otherwise the kernels may round at each addition.
        deterministic: repetitions are bit-identical, as ``torch.use_deterministic_algorithms`` asks for.
        plan: what ``index_plan`` made of both indices, which saves sorting them.

    Returns:
        A new tensor.
    """
    wide = torch.float64 if self.is_floating_point() else torch.int64
    index, rows = index.long(), self.shape[dim]
    entries = source.to(wide) if source_index is None else source.to(wide).index_select(dim, source_index.long() % source.shape[dim])
    shape = [-1 if d == dim % self.dim() else 1 for d in range(self.dim())]
    factor = torch.full_like(index, 1, dtype=wide) if weight is None else weight.to(wide)
    entries = entries * (factor * (alpha if wide is torch.float64 else int(alpha))).reshape(shape)
    kept = torch.ones_like(index, dtype=torch.bool) if ignore_index is None else index != ignore_index
    if bounds % SOURCE_STRICT == WRAP:
        index = torch.where(index < 0, index + rows, index)
    if bounds % SOURCE_STRICT == DROP:
        kept &= (index >= 0) & (index < rows)
    kept = kept.nonzero()[:, 0]
    return self.to(wide).index_add(dim, index[kept], entries.index_select(dim, kept)).to(self.dtype)


def reference_plan(
    index: torch.Tensor,
    rows: int,
    ignore_index: int | None = None,
    bounds: int = STRICT,
    source_index: torch.Tensor | None = None,
    source_rows: int = 0,
) -> torch.Tensor:
    """What ``fusebackend::index_plan`` computes: the entries sorted by row, by which sums with the same indices go.

    Args:
        index, source_index: (n,) int32 or int64, as for the sums.
        rows, source_rows: of what is added to and of the source; fewer than 2**31, as is n.
        ignore_index, bounds: as for the sums.

    Returns:
        int32, one list behind the other: the entries, stably sorted by row, those that add nothing last (n); with a
        ``source_index`` the source row of each (n); how many sorted entries come before each row's first, and at last how
        many add something (rows + 1); the row of every ``chunk_entries()``-th sorted entry, ``rows`` where it adds nothing.
    """
    row = torch.where(index < 0, index + rows, index) if bounds % SOURCE_STRICT == WRAP else index
    adds_nothing = torch.zeros_like(index, dtype=torch.bool) if ignore_index is None else index == ignore_index
    if bounds % SOURCE_STRICT == DROP:
        adds_nothing |= (row < 0) | (row >= rows)
    row, entries = torch.where(adds_nothing, rows, row).sort(stable=True)
    begins = torch.searchsorted(row, torch.arange(rows + 1, device=index.device, dtype=row.dtype))
    source_rows_of = [] if source_index is None else [source_index[entries] % source_rows]
    return torch.cat([entries, *source_rows_of, begins, row[:: chunk_entries()]]).int()


def max_dims() -> int:
    """How many dimensions a tensor may have that is added to."""
    return _limits()[0]


def chunk_entries() -> int:
    """How many sorted entries make a chunk: rows with more are summed in parts."""
    return _limits()[1]


def _limits() -> tuple[int, int]:
    """``index_add_limits()``. Without a library, whose operators nothing calls then, any numbers will do."""
    if loader.load().path is None:
        return 0, 1
    with _disable_current_modes():  # a fake tensor mode, when a fake asks
        return LIMITS()


def _fake_in_place(self, *options):
    return None


def _fake(self, *options):
    return self.new_empty_strided(self.shape, self.stride())


def _fake_zeros(rows, dim, index, source, *options):
    shape = list(source.shape)
    shape[dim] = rows
    return source.new_empty(shape)


def _fake_plan(index, rows, ignore_index, bounds, source_index, source_rows):
    n, chunk = index.shape[0], chunk_entries()
    return index.new_empty([n * (1 if source_index is None else 2) + rows + 1 + (n + chunk - 1) // chunk], dtype=torch.int32)


INDEX_ADD_ = ops.define(f"index_add_(Tensor(a!) self, {_OPTIONS}) -> ()", fake=_fake_in_place, layout=torch.Tag.needs_exact_strides)
INDEX_ADD = ops.define(f"index_add(Tensor self, {_OPTIONS}) -> Tensor", fake=_fake, layout=torch.Tag.needs_exact_strides)
INDEX_ADD_ZEROS = ops.define(f"index_add_zeros(SymInt rows, {_OPTIONS}) -> Tensor", fake=_fake_zeros, layout=torch.Tag.needs_exact_strides)
INDEX_PLAN = ops.define(
    "index_plan(Tensor index, SymInt rows, int? ignore_index, int bounds, Tensor? source_index, SymInt source_rows) -> Tensor",
    fake=_fake_plan,
    indices={"index": "rows", "source_index": "source_rows"},
)
KERNELS = (INDEX_ADD_, INDEX_ADD, INDEX_ADD_ZEROS, INDEX_PLAN)

# What the kernels say of themselves. Not for graphs.
LIMITS = ops.define("index_add_limits() -> (int max_dims, int chunk_entries)", fake=_limits)
