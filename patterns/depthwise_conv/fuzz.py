"""What the fuzzer draws for this family: convolutions that it replaces, in the ways that users write them, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder
from fusebackend.patterns.causal_conv1d.fuzz import after_each_channel


def depthwise_conv(b: Builder) -> bool | None:
    """A depthwise convolution in one or two dimensions; then perhaps batch norm in inference, or a scale and shift of each channel, an
    activation, a residual or a transposition."""
    if not b.dtype.is_floating_point or b.special:
        return False  # PyTorch's own kernels differ in whether infinity times padding is NaN
    batch, channels, multiplier = b.pick((2, 1, 3, 2, 17)), b.pick((4, 8, 1, 16, 3, 33)), b.pick((1, 1, 1, 1, 2, 3))
    flat = b.chance(25)
    taps = b.pick((3, 5, 7, 1, 2, 4, 9))
    window = (taps,) if flat else (taps, b.pick((taps, taps, taps, 1, 3)))
    dilation, stride = b.pick((1, 1, 1, 2, 3)), b.pick((1, 1, 2, 1, 2, 3))
    least = (max(window) - 1) * dilation + 1
    sides = tuple(least + b.pick((4, 0, 1, 7, 12)) for _ in window)
    if batch * channels * multiplier * sides[0] * sides[-1] > 20_000:
        batch = 1
    if flat or b.chance(60):
        x = b.operand((batch, channels, *sides))
    else:
        x = b.operand((batch, *sides, channels))
        x = b.emit(f"{x}.permute(0, 3, 1, 2)", moves=True) or x
    weight = b.operand((channels * multiplier, 1, *window))
    bias = b.operand((channels * multiplier,)) if b.chance(50) else "None"
    padding = b.pick((str(taps // 2), "0", f"{taps // 2 * dilation}", "'same'", "'valid'", str(taps)))
    if padding == "'same'" and stride != 1:
        padding = "1"
    groups = b.pick((str(channels),) * 9 + ("1",))
    if groups == "1" and channels > 1:
        weight = b.operand((channels, channels, *window))
        bias = "None"
    call = "F.conv1d" if flat else "F.conv2d"
    y = b.emit(f"{call}({x}, {weight}, {bias}, {stride}, {padding}, {dilation}, {groups})")
    if y is None:
        return
    if b.chance(30):
        y = after_each_channel(b, y, channels * multiplier, "[:, None]" if flat else "[:, None, None]") or y
    if b.chance(40):
        activation = b.pick(("silu({})", "gelu({})", "relu({})", "hardswish({})", "relu6({})", "gelu({}, approximate='tanh')"))
        y = b.emit(f"F.{activation.format(y)}") or y
    if b.chance(25):
        b.emit(b.pick((f"{y} + {y}.mean()", f"{y}.transpose(-1, -2)", f"{y}.mean(-1)")))


CORES = (depthwise_conv,)
