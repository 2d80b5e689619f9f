"""What the fuzzer draws for this family: variances over outer dims of what programs take them of, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def column_moments(b: Builder) -> bool | None:
    """A variance, with or without the mean, over some dims of a tensor, a slice or a permuted tensor."""
    if not b.dtype.is_floating_point:
        return False
    x = (b.value((2, 3, 4), b.dtype) if b.chance(30) else None) or b.input(
        b.long_shape() if b.chance(10) else b.shape(b.pick((2, 3, 4, 2)))
    )
    dims = b[x].dim()
    if dims < 2:
        return False
    if b.chance(15):
        x = b.emit(f"{x}[{b.pick(('1:', '::2', '..., 1:', ':, 1:'))}]", moves=True) or x
    if b.chance(25):
        x = b.emit(f"{x}.permute({b.permutation(dims)})", moves=True) or x
    if b.chance(25):
        x = b.emit(f"{x}.to(f32)") or x
    gone = sorted(b.permutation(dims)[: b.integer(1, dims - 1)]) if b.chance(40) else list(range(b.integer(1, dims - 1)))
    options = f"{tuple(gone)}, correction={b.pick(('0', '0', '1', '0.5', '2'))}{b.pick(('', ', keepdim=True'))}"
    if b.chance(40):
        b.emit(f"{x}.var({options})")
    else:
        b.emit(f"torch.var_mean({x}, {options})[{b.pick(('0', '1'))}]")


CORES = (column_moments,)
