"""What the fuzzer draws for this family: max pooling along one to three dims."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def pooling(b: Builder) -> bool | None:
    """``F.max_pool1d`` to ``3d`` and their adaptive kin; used twice, or beside its operand."""
    if not b.dtype.is_floating_point or b.special:
        return False
    b.training |= b.chance(85)
    dims = b.pick((2, 2, 2, 1, 3))
    sizes = [b.pick((8, 6, 7, 4, 12, 9)) for _ in range(dims)]
    x = b.operand((b.pick((2, 1, 3)), b.pick((3, 8, 1, 5)), *sizes))
    if dims == 2 and b.chance(30):
        x = b.emit(f"{x}.to(memory_format=torch.channels_last)", moves=True) or x
    if b.chance(10):
        found = b.emit(f"F.adaptive_max_pool{dims}d({x}, {b.pick((1, 2, 3))})")
    else:
        kernel = b.pick((2, 2, 3, 3, 3, 4, 5 if dims < 3 else 2))
        padding = b.pick((0, 0, 1 if kernel > 1 else 0, kernel // 2))
        dilation = b.pick((1, 1, 1, 2)) if kernel <= 3 and min(sizes) >= 6 else 1
        windows = f"{kernel}, {b.pick((2, 2, 1, 3))}, {padding}, {dilation}, {b.chance(20)}"
        found = b.emit(f"F.max_pool{dims}d({x}, {windows})")
    if found and b.chance(25):
        b.emit(f"{found} * {b.number()}")
    if found and b.chance(25):
        b.emit(f"{x}.sin() * {b.number()}")
    return None


CORES = (pooling,)
