"""What the fuzzer draws for this family: sums and means over outer dims of what programs sum so, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def column_sum(b: Builder) -> bool | None:
    """A sum or a mean over some dims of a tensor, a slice, a permuted tensor, or a product."""
    if not b.dtype.is_floating_point:
        return False
    shape = b.long_shape() if b.chance(10) else b.shape(b.pick((2, 3, 4, 2)))
    x = (b.value((2, 3, 4), b.dtype) if b.chance(30) else None) or b.input(shape)
    dims = b[x].dim()
    if dims < 2:
        return False
    if b.chance(15):
        x = b.emit(f"{x}[{b.pick(('1:', '::2', '..., 1:', ':, 1:'))}]", moves=True) or x
    if b.chance(15):
        x = b.emit(f"{x}.permute({b.permutation(dims)})", moves=True) or x
    if b.chance(25):
        x = b.emit(f"{x} * {b.operand(b[x].shape)}") or x
    if b.chance(15):
        x = b.emit(f"{x}.to(f32)") or x
    summed = sorted(b.permutation(dims)[: b.integer(1, dims - 1)]) if b.chance(40) else list(range(b.integer(1, dims - 1)))
    if b.chance(20):
        summed = [d - dims for d in summed]
    tail = b.pick(("", "", ", keepdim=True", ", dtype=torch.float64" if b.chance(30) else ""))
    b.emit(f"{x}.{b.pick(('sum', 'sum', 'mean'))}({tuple(summed)}{tail})")


def column_sums(b: Builder) -> bool | None:
    """Several sums of one tensor: with products of it, over other dims, or both, some of which need one another's results."""
    if not b.dtype.is_floating_point:
        return False
    x = b.input(b.long_shape() if b.chance(10) else b.shape(b.pick((2, 3, 3, 4))))
    dims = b[x].dim()
    if dims < 2:
        return False
    if b.chance(15):
        x = b.emit(f"{x}.permute({b.permutation(dims)})", moves=True) or x
    last = b.integer(1, dims - 1)
    for _ in range(b.integer(2, 3)):
        source = x
        if b.chance(60):
            other = x if b.chance(30) else b.operand(b[x].shape)
            wide = ".to(f32)" if b.chance(30) else ""
            source = b.emit(f"{x}{wide} * {other}{wide}") or x
        if b.chance(20):
            source = b.emit(f"{source}.to(f32)") or source
        summed = tuple(range(last if b.chance(70) else b.integer(1, dims - 1)))
        found = b.emit(f"{source}.{b.pick(('sum', 'sum', 'mean'))}({summed}, keepdim={b.chance(50)})")
        if found and b.chance(25) and b[found].dim() == dims:
            x = b.emit(f"{x} - {found}") or x


CORES = (column_sum, column_sums)
