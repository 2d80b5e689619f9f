"""What ``python -m fusebackend bench kernels`` times of this family: the table of README.md, and random shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, size

# Dtype, rows and columns of the result, and the goal as a ratio to a contiguous add.
_CUDA_TABLE = [("bf16", 24300, 11520, 1.03), ("bf16", 24300, 1152, 1.05), ("bf16", 24301, 11519, 1.15), ("fp32", 8192, 8192, 1.05)]
_CPU_TABLE = [("fp32", 512, 480, 2.5), ("bf16", 3001, 2047, 2.5)]


def cases() -> list[Case]:
    """The family's table. The floor is a contiguous add, which moves the same bytes."""

    def case(kind: str, rows: int, columns: int, goal: float) -> Case:
        def inputs(device: torch.device):
            return tuple(torch.randn(shape, device=device).to(FLOATS[kind]) for shape in ((columns, rows), (rows, columns)))

        name = f"{kind} {rows}x{columns}"
        return Case(name, lambda x, y: x.transpose(0, 1) + y, inputs, lambda x, y: y + x.view(y.shape), goal)

    return [case(*row) for row in (_CUDA_TABLE if torch.cuda.is_available() else _CPU_TABLE)]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Random sums of rank 2 to 4, sizes up to 8192, of 1 to 256 MB times ``scale``."""
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
