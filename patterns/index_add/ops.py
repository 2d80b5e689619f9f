"""The operators of the family ``index_add``: schemas, fakes, and what they compute in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops

#: What an index outside [0, rows) means: an error; counted from the end (``index_put``); adds nothing (embedding backward).
STRICT, WRAP, DROP = 0, 1, 2

#: Added to one of these: a negative source index is an error too, as in a gather. Without it, it counts from the end.
SOURCE_STRICT = 4

DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
HALVES = {torch.float16, torch.bfloat16}
INDEX_DTYPES = (torch.int64, torch.int32)

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
    return ops.ask("index_add_limits", default=(64, 1))


def _check_index(index, rows, ignore_index, bounds, source_index, source_rows) -> None:
    """Refuses what ``make_index_params`` in csrc/index_add/make_params.h refuses."""
    torch._check(
        0 <= bounds < 2 * SOURCE_STRICT and bounds % SOURCE_STRICT <= DROP,
        lambda: f"index_add: bounds={bounds}; 0 (strict), 1 (wrap) or 2 (drop) is accepted, plus 4",
    )
    torch._check(index.dim() == 1, lambda: f"index_add: index must have one dimension, not {index.dim()}")
    _check_vector("index", index, index.shape[0], INDEX_DTYPES)
    arguments.check_device("index_add", index, source_index=source_index)
    if source_index is not None:
        _check_vector("source_index", source_index, index.shape[0], INDEX_DTYPES)
    known = [n for n in map(g.hint, (rows, source_rows)) if n is not None]
    torch._check(all(n >= 0 for n in known), lambda: "index_add: a negative number of rows")
    out_of_range = g.hint(rows) == 0 and g.hint(index.shape[0]) not in (0, None) and bounds % SOURCE_STRICT != DROP
    torch._check(not out_of_range, lambda: "index_add: every index is out of range of a dimension of size 0")
    out_of_range = source_index is not None and g.hint(source_rows) == 0 and g.hint(index.shape[0]) not in (0, None)
    torch._check(not out_of_range, lambda: "index_add: every source index is out of range of a dimension of size 0")


def _check_vector(name, vector, n, dtypes) -> None:
    torch._check(vector.dtype in dtypes, lambda: f"index_add: {name} is {vector.dtype}, not {' or '.join(map(str, dtypes))}")
    fits = vector.dim() == 1 and arguments.are_same(vector.shape[0], n)
    torch._check(fits, lambda: f"index_add: {name}, {tuple(vector.shape)}, must have one element for each of the {n} entries")


def _check_sortable(index, rows, source_rows) -> None:
    sizes = [g.hint(n) or 0 for n in (index.shape[0], rows, source_rows)]
    torch._check(
        sizes[0] < 2**31 - 1 and sizes[1] < 2**31 - 1 and sizes[2] < 2**32 - 1,
        lambda: "index_add: deterministic, precise and planned sums take fewer than 2^31 entries and rows",
    )


def _check(shape, like, dim, index, source, weight, source_index, alpha, ignore_index, bounds, precise, deterministic, plan=None) -> None:
    """Refuses what ``make_params`` in csrc/index_add/make_params.h refuses. The sums have this shape, and dtype and device of ``like``."""
    rank = len(shape)
    torch._check(-rank <= dim < rank, lambda: f"index_add: dimension {dim} of a tensor with {rank}")
    torch._check(source.dim() == rank, lambda: f"index_add: self has {rank} dimensions, source {source.dim()}")
    torch._check(rank <= max_dims(), lambda: f"index_add: {rank} dimensions; up to {max_dims()} are accepted")
    torch._check(like.dtype == source.dtype, lambda: f"index_add: self is {like.dtype} and source {source.dtype}")
    torch._check(source.dtype in DTYPES, lambda: f"index_add: {source.dtype} is not supported")
    arguments.check_device("index_add", like, source=source, index=index, weight=weight, plan=plan)
    rows, source_rows = shape[dim], source.shape[dim]
    _check_index(index, rows, ignore_index, bounds, source_index, source_rows)
    fits = source_index is not None or arguments.are_same(index.shape[0], source_rows)
    torch._check(fits, lambda: f"index_add: {index.shape[0]} indices for {source_rows} rows of source")
    if weight is not None:
        _check_vector("weight", weight, index.shape[0], (source.dtype,))
    whole = (*shape[: dim % rank], source_rows, *shape[dim % rank + 1 :])
    fits = arguments.same_sizes(source.shape, whole)
    torch._check(fits, lambda: f"index_add: self, {tuple(shape)}, and source, {tuple(source.shape)}, differ beside dimension {dim}")
    if precise or deterministic or plan is not None:
        _check_sortable(index, rows, source_rows)
    if plan is not None:
        fits = arguments.same_sizes(plan.shape, [_plan_words(index, rows, source_index)])
        right = fits and plan.dtype == torch.int32 and arguments.is_contiguous(plan)
        torch._check(right, lambda: "index_add: the plan is of another index, or for another number of rows")


def _plan_words(index, rows, source_index) -> Any:
    n, chunk = index.shape[0], chunk_entries()
    return n * (1 if source_index is None else 2) + rows + 1 + (n + chunk - 1) // chunk


def _fake_in_place(self, *options):
    torch._check(not arguments.is_expanded(self), lambda: "index_add: self must not be expanded")
    _check(self.shape, self, *options)


def _fake(self, *options):
    torch._check(arguments.covers_memory(self), lambda: "index_add: self must be dense and non-overlapping")
    _check(self.shape, self, *options)
    return self.new_empty_strided(self.shape, self.stride())


def _fake_zeros(rows, dim, index, source, *options):
    rank = source.dim()
    torch._check(-rank <= dim < rank, lambda: f"index_add: dimension {dim} of a tensor with {rank}")
    shape = list(source.shape)
    shape[dim] = rows
    _check(shape, source, dim, index, source, *options)
    return source.new_empty(shape)


def _fake_plan(index, rows, ignore_index, bounds, source_index, source_rows):
    _check_index(index, rows, ignore_index, bounds, source_index, source_rows)
    _check_sortable(index, rows, source_rows)
    return index.new_empty([_plan_words(index, rows, source_index)], dtype=torch.int32)


INDEX_ADD_ = ops.define(f"index_add_(Tensor(a!) self, {_OPTIONS}) -> ()", fake=_fake_in_place, layout=ops.UNPADDED)
INDEX_ADD = ops.define(f"index_add(Tensor self, {_OPTIONS}) -> Tensor", fake=_fake, layout=ops.UNPADDED)
INDEX_ADD_ZEROS = ops.define(f"index_add_zeros(SymInt rows, {_OPTIONS}) -> Tensor", fake=_fake_zeros, layout=ops.UNPADDED)
INDEX_PLAN = ops.define(
    "index_plan(Tensor index, SymInt rows, int? ignore_index, int bounds, Tensor? source_index, SymInt source_rows) -> Tensor",
    fake=_fake_plan,
    indices={"index": "rows", "source_index": "source_rows"},
)
KERNELS = (INDEX_ADD_, INDEX_ADD, INDEX_ADD_ZEROS, INDEX_PLAN)

# What the kernels say of themselves. Not for graphs.
ops.define("index_add_limits() -> (int max_dims, int chunk_entries)", fake=_limits)
