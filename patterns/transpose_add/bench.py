"""What ``python -m fusebackend bench kernels`` times of this family: its table, and random shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, size


def cases() -> list[Case]:
    """The table of the README. The floor is a contiguous add: it moves the same bytes with no transposition."""

    def case(name: str, dtype: torch.dtype, rows: int, columns: int, goal: float) -> Case:
        def inputs(device: torch.device):
            return torch.randn(columns, rows, device=device).to(dtype), torch.randn(rows, columns, device=device).to(dtype)

        return Case(name, lambda x, y: x.transpose(0, 1) + y, inputs, lambda x, y: y + x.view(y.shape), goal)

    if not torch.cuda.is_available():
        return [case("fp32 512x480", torch.float32, 512, 480, 2.5), case("bf16 3001x2047", torch.bfloat16, 3001, 2047, 2.5)]
    return [
        case("bf16 24300x11520", torch.bfloat16, 24300, 11520, 1.03),
        case("bf16 24300x1152", torch.bfloat16, 24300, 1152, 1.05),
        case("bf16 24301x11519", torch.bfloat16, 24301, 11519, 1.15),
        case("fp32 8192x8192", torch.float32, 8192, 8192, 1.05),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        kind, rank = draw.choice(list(FLOATS)), draw.randint(2, 4)
        shape = [size(draw, 2, 8192) for _ in range(rank)]
        order = draw.sample(range(rank), rank)
        if order == sorted(order) or not 2**20 <= math.prod(shape) * FLOATS[kind].itemsize / scale <= 2**28:
            continue

        def inputs(device, dtype=FLOATS[kind], shape=tuple(shape), order=tuple(order)):
            x = torch.randn(shape, device=device).to(dtype)
            return x, torch.randn([shape[d] for d in order], device=device).to(dtype)

        def fn(x, y, order=tuple(order)):
            return x.permute(order) + y

        yield Case(f"{kind} {'x'.join(map(str, shape))} ({','.join(map(str, order))})", fn, inputs, lambda x, y: x.view(y.shape) + y)
