"""What ``python -m fusebackend bench kernels`` times of this family: gradients of vision models, channels last, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform

_FUNCTIONS = {2: F.conv2d, 3: F.conv3d}


def cases() -> list[Case]:
    """None on a CPU, where convolutions are left as they are."""
    if not torch.cuda.is_available():
        return []
    sizes = [
        (256, 16, 96, (112, 112)),
        (256, 144, 32, (56, 56)),
        (256, 672, 112, (14, 14)),
        (256, 1152, 48, (1, 1)),
        (128, 256, 64, (56, 56)),
    ]
    return [_case(*each, "bf16") for each in sizes]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of 8 to 2,048 channels, in two and three dims: cuDNN gives planes in one."""
    while True:
        dims, kind = draw.choice((2, 2, 2, 3)), draw.choice(("bf16", "fp16"))
        channels, outputs = (_channels(draw) for _ in range(2))
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / (2 * (channels + outputs))
        pixels = log_uniform(draw, 1, max(elements, 1))
        sides = tuple(max(1, round(pixels ** (1 / dims))) for _ in range(dims))
        yield _case(max(1, round(elements / math.prod(sides))), channels, outputs, sides, kind)


def _channels(draw: random.Random) -> int:
    size = round(log_uniform(draw, 8, 2048))
    return size // 8 * 8 if draw.random() < 0.9 else size


def _case(batch: int, channels: int, outputs: int, sides: tuple[int, ...], kind: str) -> Case:
    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        x = torch.randn(batch, *sides, channels, device=device, dtype=FLOATS[kind]).movedim(-1, 1)
        return x, torch.randn(outputs, channels, *[1] * len(sides), device=device, dtype=FLOATS[kind])

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _FUNCTIONS[len(sides)](x, weight)

    name = f"{kind} {batch}x{channels}x{'x'.join(map(str, sides))} to {outputs}, backward"
    return Case(name, convolve, inputs, backward=(0, 1), static=True)
