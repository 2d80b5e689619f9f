"""What the fuzzer draws for this family: interpolations, whose gradients are sums at grids, indexing by grids, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder

_MODES = {1: ("linear", "nearest"), 2: ("bilinear", "bilinear", "nearest", "bicubic"), 3: ("trilinear", "nearest")}


def interpolation(b: Builder) -> bool | None:
    """``F.interpolate`` by a factor, or to a size; used twice, or beside its operand."""
    if not b.dtype.is_floating_point or b.special:
        return False
    b.training |= b.chance(85)
    dims = b.pick((2, 2, 2, 1, 3))
    sizes = [max(b.pick((5, 3, 7, 4, 8, 2, 1)), 1) for _ in range(dims)]
    x = b.operand((b.pick((2, 1, 3)), b.pick((3, 8, 1, 5)), *sizes))
    if dims == 2 and b.chance(30):
        x = b.emit(f"{x}.to(memory_format=torch.channels_last)", moves=True) or x
    mode = b.pick(_MODES[dims])
    corners = "" if mode == "nearest" else f", align_corners={b.chance(40)}"
    if b.chance(60):
        to = f"scale_factor={b.pick((2, 2, 1.5, 3, 0.5))}"
    else:
        to = f"size={[b.pick((7, 10, 4, 1, 16)) for _ in range(dims)]}"
    found = b.emit(f"F.interpolate({x}, {to}, mode='{mode}'{corners})")
    if found and b.chance(25):
        b.emit(f"{found} * {b.number()}")
    if found and b.chance(25):
        b.emit(f"{x}.sin() * {b.number()}")
    return None


def grid(b: Builder) -> bool | None:
    """``x[..., i[:, None], j]``, of indices that repeat and may be negative; now and then with a dim between them, or behind them."""
    if not b.dtype.is_floating_point:
        return False
    b.training |= b.chance(85)
    rows, columns = b.pick((5, 3, 8)), b.pick((4, 7, 2))
    behind = (b.pick((3, 8)),) if b.chance(30) else ()
    x = b.operand((b.pick((2, 3, 1)), rows, columns, *behind))
    i, j = (b.index((b.pick((6, 9, 2)),), bound, signed=b.chance(30)) for bound in (rows, columns))
    if b.chance(15):
        b.emit(f"{x}[:, {i}[:, None, None], {j}[:, None]]" if behind else f"{x}[:, {i}[None], {j}[:, None]]")
    else:
        b.emit(f"{x}[:, {i}[:, None], {j}]")
    return None


CORES = (interpolation, grid)
