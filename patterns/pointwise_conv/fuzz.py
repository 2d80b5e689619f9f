"""What the fuzzer draws for this family: 1x1 convolutions in one to three dimensions, and near misses."""

from __future__ import annotations

import torch

from fusebackend.fuzz.builder import Builder

_HALVES = (torch.bfloat16, torch.float16)


def pointwise_conv(b: Builder) -> bool | None:
    """A 1x1 convolution of planes, of channels that lie last, or of neither; then perhaps an activation or a second one.

    Not of huge numbers: whether a sum of products overflows depends on the order of its terms.
    """
    if b.dtype not in _HALVES or b.special:
        return False
    channels, outputs, dims = b.pick((8, 16, 3, 1)), b.pick((8, 5, 16, 1)), b.pick((2, 2, 2, 1, 3))
    batch, sides = b.pick((2, 1, 3)), tuple(b.pick((4, 1, 5, 7)) for _ in range(dims))
    if b.chance(30):
        x = b.operand((batch, channels, *sides))
    else:
        x = b.operand((batch, *sides, channels))
        x = b.emit(f"{x}.movedim(-1, 1)", moves=True) or x
    y: str | None = x
    for _ in range(b.pick((1, 1, 2))):
        weight = b.operand((outputs, channels, *[b.pick((1,) * 9 + (2,)) if s > 1 else 1 for s in sides]))
        bias = b.operand((outputs,)) if b.chance(20) else "None"
        y = b.emit(f"F.conv{dims}d({y}, {weight}, {bias}, {b.pick((1,) * 9 + (2,))})")
        if y is None:
            return False
        if b.chance(30):
            y = b.emit(f"F.{b.pick(('silu', 'relu', 'gelu'))}({y})") or y
        channels, sides = outputs, (1,) * dims
    return None


CORES = (pointwise_conv,)
