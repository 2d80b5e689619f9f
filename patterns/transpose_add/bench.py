"""What ``python -m fusebackend bench kernels`` times of this family: the table of README.md, and random shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import DTYPES, FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, shape, tensor

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
    """Random sums of rank 2 to 4."""
    while True:
        rank, kind = draw.randint(2, 4), draw.choice(list(DTYPES))
        dtype = DTYPES[kind]
        sizes = shape(draw, rank, scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES / 2) / dtype.itemsize)
        order = tuple(draw.sample(range(rank), rank))
        kept = [d for d in order if sizes[d] > 1]
        if kept == sorted(kept) or not LEAST_BYTES * min(scale, 1) <= math.prod(sizes) * dtype.itemsize <= MOST_BYTES / 2 * scale:
            continue
        alpha = draw.choice((1, 1, 0.5)) if dtype.is_floating_point else 1

        def inputs(device, dtype=dtype, sizes=sizes, order=order):
            return tensor(sizes, dtype, device), tensor(tuple(sizes[d] for d in order), dtype, device)

        def fn(x, y, order=order, alpha=alpha):
            return torch.add(x.permute(order), y, alpha=alpha)

        name = f"{kind} {'x'.join(map(str, sizes))} ({','.join(map(str, order))}){f' times {alpha}' if alpha != 1 else ''}"
        yield Case(name, fn, inputs, lambda x, y: x.view(y.shape) + y)
