"""What families draw random shapes with, for ``bench kernels --random``: dtypes and log-uniform sizes."""

from __future__ import annotations

import math
import random

import torch

#: The dtypes that random cases have, by the name that a case shows.
FLOATS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: And those of data that is only moved, or added, in models that are not of floats alone.
DTYPES = {**FLOATS, "fp64": torch.float64, "int8": torch.int8}

#: Bytes of a random tensor: from what fits in any cache to what a large model holds.
LEAST_BYTES, MOST_BYTES = 1 << 16, 1 << 30


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """A number between ``low`` and ``high`` whose logarithm is uniformly distributed.

    By hand, since ``scipy.stats.loguniform`` takes hundreds of times as long for one number, and a seed would then give other cases.
    """
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def size(draw: random.Random, low: float, high: float) -> int:
    """A log-uniform integer of at least 1.

    Every second size from 16 on, as chance has it, is rounded to a multiple of the largest power of two that is at most an
    eighth of it: the sizes of models often are such multiples.
    """
    return _rounded(draw, log_uniform(draw, low, high))


def _rounded(draw: random.Random, size: float) -> int:
    step = 2 ** int(math.log2(size / 8)) if size >= 16 and draw.random() < 0.5 else 1
    return max(1, round(size / step) * step)


def shape(draw: random.Random, rank: int, elements: float) -> tuple[int, ...]:
    """Sizes whose product is about ``elements``."""
    cuts = [0.0, *sorted(draw.random() for _ in range(rank - 1)), 1.0]
    return tuple(_rounded(draw, elements ** (b - a)) for a, b in zip(cuts, cuts[1:]))


def rows_or_image(draw: random.Random, elements: float) -> tuple[int, ...]:
    """About so many elements as rows, or as images whose channels lie innermost, as batch norm sees them: even numbers of them, of even
    sides."""
    columns = size(draw, 2, min(4096, elements / 8))
    rows = max(2, round(elements / columns))
    if draw.random() >= 0.6:
        return rows, columns
    channels = 8 * size(draw, 1, 256)
    side = draw.choice((7, 8, 14, 16, 28, 32, 56, 64, 112))
    return max(1, 8 * round(elements / channels / side**2 / 8)), side, side, channels


def tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers of any dtype."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(-100, 100, shape, device=device, dtype=dtype)
