"""What the fuzzer draws for this family: sums along rows by an index, gathers whose backward they are, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def row_scatter(b: Builder) -> bool | None:
    """``scatter_add`` along the last dim, or another: an index for each element, expanded along some dims, or smaller than the source."""
    if not b.dtype.is_floating_point:
        return False
    shape = b.shape(b.pick((2, 3, 2, 4)))
    bins = b.size()
    dims = len(shape)
    d = dims - 1 if b.chance(85) else b.integer(0, dims - 1)
    source = b.operand(shape)
    if b.chance(25):
        source = b.emit(f"{source} * {b.number()}") or source
    if b.chance(20):
        source = b.emit(f"{b.operand([*shape[:-2], shape[-1], shape[-2]])}.mT", moves=True) or source
    wide = _index(b, shape, bins, d)
    if wide is None:
        return None
    target = [bins if i == d else n for i, n in enumerate(shape)]
    sizes = ", ".join(map(str, target))
    start = b.emit(f"{source}.new_zeros({sizes})") if b.chance(60) else b.operand(target)
    if start is None:
        return None
    method = b.pick(("scatter_add", "scatter_add", "scatter_reduce"))
    reduce = ", 'sum'" if method == "scatter_reduce" else ""
    dim = d if b.chance(50) else d - dims
    b.emit(f"{start}.{method}({dim}, {wide}, {source}{reduce})")
    return None


def gather(b: Builder) -> bool | None:
    """``gather`` along the last dim, whose backward is a sum along rows."""
    if not b.dtype.is_floating_point:
        return False
    b.training |= b.chance(80)
    shape = b.shape(b.pick((2, 3, 3, 4)))
    x = (b.value((2, 3), b.dtype) if b.chance(20) else None) or b.operand(shape)
    sizes = list(b[x].shape)
    wanted = [*sizes[:-1], b.pick((5, 16, 1, 33, sizes[-1]))]
    wide = _index(b, wanted, sizes[-1], len(sizes) - 1)
    if wide is None:
        return None
    found = b.emit(f"{x}.gather(-1, {wide})")
    if found and b.chance(40):
        b.emit(f"{found}.mT * {b.number()}")
    return None


def _index(b: Builder, shape: list[int], bins: int, d: int) -> str | None:
    """int64, of the shape of a source, or smaller."""
    if b.chance(6):
        b.note("index smaller than the source")
        shape = [max(n - (i == d or b.chance(30)), 0) for i, n in enumerate(shape)]
    own = [1 if i != d and b.chance(40) else n for i, n in enumerate(shape)]
    index = b.index(own, bins)
    if own != list(shape):
        index = b.emit(f"{index}.expand({', '.join(map(str, shape))})", moves=True) or index
    return b.emit(f"{index}.to(torch.int64)")


CORES = (row_scatter, gather)
