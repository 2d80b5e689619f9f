"""What families draw random shapes with, for ``bench kernels --random``: dtypes and log-uniform sizes."""

from __future__ import annotations

import math
import random

import torch

#: The dtypes that random cases have, by the name that a case shows.
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    size = log_uniform(draw, low, high)
    step = 2 ** int(math.log2(size / 8)) if size >= 16 and draw.random() < 0.5 else 1
    return max(1, round(size / step) * step)
