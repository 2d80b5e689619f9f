"""Random shapes of the families' own operations: whether a substitution is ever slower shows at sizes that nobody chose.

Sizes are log-uniform, limited by the bytes that are moved and by what PyTorch's kernel takes.
"""

from __future__ import annotations

import math
import random

import torch

from fusebackend.bench.case import Case
from fusebackend.rewriting.registry import families

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cases(family: str, count: int, seed: int) -> list[Case]:
    """``count`` cases of a family; the same for the same seed, on a GPU or without one."""
    found: dict[str, Case] = {}
    drawn = families()[family].bench.random_cases(random.Random(seed), 1.0 if torch.cuda.is_available() else 1 / 64)
    while len(found) < count:
        case = next(drawn)
        found.setdefault(case.name, case)
    return list(found.values())


def size(draw: random.Random, low: float, high: float) -> int:
    """Log-uniform; every other one is a multiple of the largest power of two that is no more than an eighth of it."""
    size = math.exp(draw.uniform(math.log(low), math.log(high)))
    step = 2 ** int(math.log2(size / 8)) if size >= 16 and draw.random() < 0.5 else 1
    return max(1, round(size / step) * step)
