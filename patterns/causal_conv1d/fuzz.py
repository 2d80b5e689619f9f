"""What the fuzzer draws for this family: convolutions that it replaces, in the ways that users write them, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def causal_conv1d(b: Builder) -> bool | None:
    """A depthwise convolution, padded or sliced, or one that looks like it; then perhaps a constant, SiLU and a transposition."""
    if not b.dtype.is_floating_point or b.special:
        return False  # PyTorch's own kernels differ in whether infinity times padding is NaN
    batch, channels, length = b.pick((2, 1, 3, 2, 1, 3, 2, 0)), b.pick((4, 8, 1, 16, 3, 33)), b.pick((9, 16, 33, 64, 5, 1, 130, 17, 40))
    taps = b.pick((4, 3, 2, 4, 3, 1, 7, length, 31, length + 2))
    if b.chance(40):
        x = b.operand((batch, length, channels))
        x = b.emit(f"{x}.transpose(1, 2)", moves=True) or x
    else:
        x = b.operand((batch, channels, length))
    weight = b.operand((channels, 1, taps))
    bias = b.operand((channels,)) if b.chance(50) else "None"
    left = taps - 1 if b.chance(90) else b.integer(0, taps + 2)
    odd = b.pick(("",) * 12 + (", stride=2", ", dilation=2"))
    groups = f", groups={channels}"
    kind = b.integer(0, 7)
    if kind <= 2:
        plain = f"({left}, 0)"
        pad = b.pick((plain, f"({left}, 0, 0, 0)", plain, f"({left}, 1)", plain, f"({left}, -1)", plain, plain, f"({left}, 0, 1, 0)"))
        value = ", value=1.0" if b.chance(4) else ""
        padded = b.emit(f"F.pad({x}, {pad}{value})", moves=True) or x
        y = b.emit(f"F.conv1d({padded}, {weight}, {bias}{groups}{odd})")
    elif kind <= 5:
        y = b.emit(f"F.conv1d({x}, {weight}, {bias}, padding={left}{groups}{odd})")
        whole = f":{b.size_of(length)}"
        cut = b.pick((whole, f":-{max(taps - 1, 1)}", whole, f"1:{length}", ":-1", whole, f":{length}:2"))
        y = (b.emit(f"{y}[..., {cut}]", moves=True) if y and b.chance(85) else y) or y
    elif kind == 6:
        y = b.emit(f"F.conv1d({x}, {weight}, {bias}, padding='same'{groups})")
    else:
        y = b.emit(f"F.conv1d({x}[0], {weight}, {bias}, padding={left}{groups})")
    if y is None:
        return
    if b.chance(40):
        y = b.emit(f"{y} + {b.number()}") or y
    if b.chance(40):
        y = b.emit(f"F.silu({y})") or y
    if b.chance(25):
        b.emit(b.pick((f"{y}.transpose(-1, -2)", f"{y} * torch.sigmoid({y})", f"F.silu({y} + 1)")))


CORES = (causal_conv1d,)
