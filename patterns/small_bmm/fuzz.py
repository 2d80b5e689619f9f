"""What the fuzzer draws for this family: products of batches of small matrices, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def small_bmm(b: Builder) -> bool | None:
    """``x @ y`` of batches, either operand transposed, sliced or expanded.

    Not of huge numbers: whether a sum of products overflows depends on the order of its terms.
    """
    if not b.dtype.is_floating_point or b.special:
        return False
    batch = b.pick((2, 3, 5, 1, 17))
    m, n, k = (b.pick((2, 3, 4, 5, 8, 1, 16, 33 if b.chance(5) else 12)) for _ in range(3))
    x = _operand(b, batch, m, k)
    y = _operand(b, batch, k, n)
    b.emit(b.pick((f"{x} @ {y}", f"torch.bmm({x}, {y})", f"torch.einsum('bik,bkj->bij', {x}, {y})")))


def _operand(b: Builder, batch: int, rows: int, columns: int) -> str:
    if b.chance(30):
        x = b.operand((batch, columns, rows))
        return b.emit(f"{x}.mT", moves=True) or x
    if b.chance(10):
        x = b.operand((batch, rows + 1, columns))
        return b.emit(f"{x}[:, 1:]", moves=True) or x
    if b.chance(10):
        x = b.operand((1, rows, columns))
        return b.emit(f"{x}.expand({batch}, {rows}, {columns})", moves=True) or x
    return b.operand((batch, rows, columns))


CORES = (small_bmm,)
