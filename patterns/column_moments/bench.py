"""What ``python -m fusebackend bench kernels`` times of this family: the statistics of batch norm, of images and of rows, random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, rows_or_image, tensor


def wide(x: torch.Tensor) -> torch.Tensor:
    """What autocast makes of 16 bits before a batch norm; also in float64, in which the reference is computed."""
    return x.float() if x.dtype.itemsize == 2 else x


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the reciprocal standard deviation of each channel, (batch, channels, height, width) -> (1, channels, 1, 1)."""
    variance, mean = torch.var_mean(wide(x), (0, 2, 3), correction=0, keepdim=True)
    return mean, torch.rsqrt(variance + 1e-5)


def cases() -> list[Case]:
    """The floor of one is half of a copy, which moves the bytes twice."""
    few = 1 if torch.cuda.is_available() else 32  # times fewer images

    def image(kind: str, n: int, c: int, h: int, goals: dict[str, float]) -> Case:
        def inputs(device: torch.device):
            return (tensor((max(1, n // few), h, h, c), FLOATS[kind], device).permute(0, 3, 1, 2),)

        return Case(f"{kind} {n}x{c}x{h}x{h} NHWC", statistics, inputs, goals=goals)

    def rows(device: torch.device):
        return (tensor((800_000 // few, 128), FLOATS["bf16"], device),)

    return [
        image("bf16", 256, 32, 112, {}),
        image("bf16", 256, 96, 112, {}),
        image("bf16", 256, 144, 56, {}),
        image("bf16", 256, 672, 14, {}),
        image("fp32", 128, 64, 112, {}),
        Case("bf16 800000x128", lambda x: torch.var_mean(wide(x), 0, correction=0), rows),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of rows, and of images whose channels lie innermost."""
    while True:
        kind = draw.choice(list(FLOATS))
        dtype = FLOATS[kind]
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / dtype.itemsize
        shape = rows_or_image(draw, elements)
        if not LEAST_BYTES * min(scale, 1) <= math.prod(shape) * dtype.itemsize <= MOST_BYTES * scale:
            continue
        reads_on = draw.random() < 0.7
        yield _case(f"{kind} {'x'.join(map(str, shape))} {'norm' if reads_on else 'var_mean'}", shape, dtype, reads_on)


def _case(name: str, shape: tuple[int, ...], dtype: torch.dtype, reads_on: bool) -> Case:
    dims = tuple(range(len(shape) - 1))

    def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance, mean = torch.var_mean(wide(x), dims, correction=0)
        return mean, torch.rsqrt(variance + 1e-5) if reads_on else variance

    return Case(name, moments, lambda device: (tensor(shape, dtype, device),))
