"""What the fuzzer draws for this family: convolutions that it replaces, in the ways that users write them, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def causal_conv1d(b: Builder) -> bool | None:
    """A depthwise convolution, padded or sliced, or one that looks like it; then perhaps a constant, batch norm
    in inference or a scale and shift of each channel, an activation and a transposition."""
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
    if kind < 7 and b.chance(30):
        y = after_each_channel(b, y, channels, "[:, None]") or y
    if b.chance(50):
        activation = b.pick(("silu({})", "silu({})", "silu({})", "gelu({})", "relu({})", "hardswish({})", "gelu({}, approximate='tanh')"))
        y = b.emit(f"F.{activation.format(y)}") or y
    if b.chance(25):
        b.emit(b.pick((f"{y}.transpose(-1, -2)", f"{y} * torch.sigmoid({y})", f"F.silu({y} + 1)")))


def after_each_channel(b: Builder, y: str, channels: int, beside: str) -> str | None:
    """Batch norm, or a part of its arithmetic. ``beside``: the subscript that shows a vector of channels beside ``y``."""
    vectors = [b.operand((channels,)) for _ in range(3)]
    if b.chance(50):
        mean, scale, shift = vectors
        return b.emit(f"F.batch_norm({y}, {mean}.detach(), {scale}.detach().square() + 0.5, {scale}, {shift})")
    for form in (" - {}", " * {}", " + {}"):
        if b.chance(60):
            y = b.emit(f"{y}{form.format(f'{vectors.pop()}{beside}')}") or y
    return y


def by_fft(b: Builder) -> bool | None:
    """The same written by FFT, in the ways that models write it, and near misses: what wraps around, or uses the transforms elsewhere."""
    if b.dtype.itemsize < 4 or not b.dtype.is_floating_point or b.special:
        return False  # PyTorch transforms no 16-bit rows on CPUs, and an infinity makes its whole row NaN
    batch, channels, length = b.pick((2, 1, 3)), b.pick((4, 1, 3, 5)), b.pick((9, 16, 33, 64, 1, 40))
    taps = b.pick((length, 4, length, 1, 17))
    shape = b.pick(((batch, channels, length),) * 3 + ((channels, length), (batch, channels, 2, length)))
    u = b.operand(shape)
    k = b.operand(b.pick(((channels, taps), (1, channels, taps))) if len(shape) < 4 else (channels, 1, taps))
    n = b.pick((2 * length, length + taps - 1, length + taps + 3, length + taps - 1, 2 * length, max(length, taps)))
    start, stop = b.pick(((0, length),) * 5 + ((1, length), (0, n), (max(taps - 1, 0), length)))
    norm = b.pick(("",) * 3 + (", norm='ortho'", ", norm='forward'"))
    whole = b.chance(15)
    forward, inverse = ("fft", "ifft") if whole else ("rfft", "irfft")
    points = f"2 * {b.size_of(length)}" if n == 2 * length else str(n)
    u_f = b.emit(f"torch.fft.{forward}({u}, n={points}{norm})")
    k_f = b.emit(f"torch.fft.{forward}({k}, n={points}{norm})")
    if u_f is None or k_f is None:
        return False
    if b.chance(8):  # a number that would overflow the taps
        u_f = b.emit(f"torch.fft.{forward}({u} * 1e-38, n={points}{norm}) * 1e38") or u_f
    scaled = b.pick((k_f, k_f, f"({k_f} / {n})", f"(2 * {k_f})", f"{k_f}.conj()"))
    y = b.emit(f"torch.fft.{inverse}({u_f} * {scaled}, n={points}{norm}){'.real' if whole else ''}")
    part = f":{b.size_of(length)}" if (start, stop) == (0, length) else f"{start}:{stop}"
    y = y and b.emit(f"{y}[..., {part}]", moves=True)
    if y is None:
        return False
    if b.chance(10):
        y = b.emit(f"{y} * {u_f}.abs().sum()") or y
    if b.chance(50) and (start, stop) == (0, length):
        b.emit(f"{y} + {u} * {b.number()}")
    return None


CORES = (causal_conv1d, by_fft)
