"""What the fuzzer draws for this family: every spelling of a product, with operands in any layout, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def matmul(b: Builder) -> bool | None:
    """One of mm, addmm, bmm, baddbmm, matmul and linear."""
    if not b.dtype.is_floating_point:
        return False
    m, k, n = b.size(), b.size(), b.size()
    alphas = f", beta={b.number()}, alpha={b.number()}" if b.chance(40) else ""
    if b.chance(40):
        batch = b.pick((2, 3, 1, 0))
        x, y = _matrix(b, (batch, m, k)), _matrix(b, (batch, k, n))
        d = b.operand(b.pick(((batch, m, n), (n,), (m, 1), (1, 1, 1))))
        kinds = (f"torch.bmm({x}, {y})", f"torch.baddbmm({d}, {x}, {y}{alphas})", f"{x} @ {y}")
    else:
        x, y = _matrix(b, (m, k)), _matrix(b, (k, n))
        d = b.operand(b.pick(((m, n), (n,), (m, 1), ())))
        kinds = (f"{x} @ {y}", f"torch.addmm({d}, {x}, {y}{alphas})", f"F.linear({x}, {y}.mT)", f"torch.mm({x}, {y})")
    b.emit(b.pick(kinds))


def _matrix(b: Builder, shape: tuple[int, ...]) -> str:
    if b.chance(40):
        x = b.operand((*shape[:-2], shape[-1], shape[-2]))
        return b.emit(f"{x}.mT", moves=True) or x
    return b.operand(shape)


CORES = (matmul,)
