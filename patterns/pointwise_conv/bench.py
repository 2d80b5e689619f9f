"""What ``python -m fusebackend bench kernels`` times of this family: convolutions of audio and vision models, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import LEAST_BYTES, MOST_BYTES, log_uniform

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def cases() -> list[Case]:
    """None on a CPU, where convolutions are left as they are."""
    if not torch.cuda.is_available():
        return []
    rows = [
        (256, 16, 96, (112, 112)),
        (256, 144, 32, (56, 56)),
        (256, 672, 112, (14, 14)),
        (256, 1152, 48, (1, 1)),
        (128, 256, 64, (56, 56)),
    ]
    planes = [(16, 1024, 2048, (512,)), (32, 512, 512, (1000,)), (16, 192, 384, (800,)), (32, 64, 128, (4096,)), (16, 128, 64, (64, 64))]
    return [
        *(_case(*sizes, "bf16", channels_last=True, backward=(0, 1)) for sizes in rows),
        *(_case(*sizes, "bf16", channels_last=False, backward=()) for sizes in planes),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Gradients channels last and products of planes, of 8 to 2,048 channels."""
    while True:
        dims, kind = draw.choice((1, 2, 2, 2, 3)), draw.choice(list(_HALVES))
        channels, outputs = (_channels(draw) for _ in range(2))
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / (2 * (channels + outputs))
        pixels = log_uniform(draw, 1, max(elements, 1))
        sides = tuple(max(1, round(pixels ** (1 / dims))) for _ in range(dims))
        batch = max(1, round(elements / math.prod(sides)))
        backward = draw.random() < 0.6
        yield _case(batch, channels, outputs, sides, kind, channels_last=backward, backward=(0, 1) if backward else ())


def _channels(draw: random.Random) -> int:
    size = round(log_uniform(draw, 8, 2048))
    return size // 8 * 8 if draw.random() < 0.9 else size


def _case(
    batch: int, channels: int, outputs: int, sides: tuple[int, ...], kind: str, *, channels_last: bool, backward: tuple[int, ...]
) -> Case:
    dtype = _HALVES[kind]

    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        x = torch.randn(batch, *sides, channels, device=device, dtype=dtype).movedim(-1, 1)
        weight = torch.randn(outputs, channels, *[1] * len(sides), device=device, dtype=dtype)
        return (x if channels_last else x.contiguous()), weight

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _FUNCTIONS[len(sides)](x, weight)

    order = "channels last" if channels_last else "planes"
    name = f"{kind} {batch}x{channels}x{'x'.join(map(str, sides))} to {outputs}, {order}{' backward' if backward else ''}"
    fn: Callable = convolve
    return Case(name, fn, inputs, backward=backward, static=True)
