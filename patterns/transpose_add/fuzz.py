"""What the fuzzer draws for this family: the sequences that its pattern matches, in the spellings that users write, and near misses."""

from __future__ import annotations

import torch

from fusebackend.fuzz.builder import Builder


def transpose_add(b: Builder) -> None:
    """``x.permute(...) + alpha * y``, either operand permuted, ``y`` of full size or broadcast."""
    x = (b.value((2, 3, 4), b.dtype) if b.chance(40) else None) or b.input(b.long_shape() if b.chance(6) else b.shape(b.pick((2, 3, 2, 4))))
    shape = tuple(b[x].shape)
    if b.chance(85):
        order = b.permutation(len(shape))
        permuted = (b.emit(f"{x}.permute({order})", moves=True) if len(shape) > 2 or b.chance(20) else b.emit(f"{x}.mT", moves=True)) or x
    else:
        permuted = x
    wanted = list(b[permuted].shape)
    kind = b.integer(0, 8)
    if kind == 6:
        wanted[b.integer(0, len(wanted) - 1)] = 1
    if kind == 7:
        wanted = wanted[1:]
    if kind == 8:
        b.note("broadcast values")
        wanted = [] if b.chance(20) else [1 if b.chance(50) else n for n in wanted]
    dtype = b.dtype if b.chance(95) else torch.float32
    y = b.operand(wanted, dtype) if b.chance(20) else b.input(wanted, dtype)
    alpha = f", alpha={b.number()}" if b.chance(40) else ""
    first, second = (permuted, y) if b.chance(60) else (y, permuted)
    kinds = (
        f"torch.add({first}, {second}{alpha})",
        f"{first} + {second}",
        f"torch.sub({first}, {second}{alpha})",
        f"{first}.add({second}{alpha})",
        f"torch.rsub({first}, {second}{alpha})",
    )
    if b.chance(10) and b[y].dim() == b[permuted].dim():
        b.do(f"{y}.add_({permuted}{alpha})")
    else:
        b.emit(b.pick(kinds)) or b.emit(f"{first} + {second}")


CORES = (transpose_add,)
