"""What ``python -m fusebackend bench kernels`` times of this family: the table of README.md, and random shapes."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS
from fusebackend.patterns.permute.ops import permute_copy

# Shape, permutation, and the goal as a ratio to a copy of the same bytes: transposes, NCHW <-> NHWC, short dims, window partition.
_CUDA_TABLE = [
    ((64, 1024, 1024), (0, 2, 1), 1.03),
    ((256, 256, 1024), (1, 0, 2), 1.03),
    ((64, 56, 56, 256), (0, 3, 1, 2), 1.03),
    ((3000, 300, 33), (2, 0, 1), 1.15),
    ((4096, 512, 3), (0, 2, 1), 1.15),
    ((4096, 3, 512), (0, 2, 1), 1.10),
    ((64, 128, 48, 96), (3, 2, 1, 0), 1.10),
    ((32, 16, 1000, 70), (0, 1, 3, 2), 1.10),
    ((64, 8, 7, 8, 672), (0, 1, 3, 2, 4), 1.03),
]
_CPU_TABLE = [((8, 512, 511), (0, 2, 1), 3.0), ((64, 64, 512), (1, 0, 2), 2.0), ((8, 8, 7, 8, 448), (0, 1, 3, 2, 4), 2.0)]
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def cases() -> list[Case]:
    """The family's table. The floor is a copy of the same bytes."""

    def case(kind: str, shape: tuple[int, ...], permutation: tuple[int, ...], goal: float) -> Case:
        def inputs(device: torch.device):
            return (torch.randn(shape, device=device, dtype=_DTYPES[kind]),)

        name = f"{kind} {'x'.join(map(str, shape))} {permutation}".replace(", ", "")
        return Case(name, lambda x: x.permute(permutation).contiguous(), inputs, lambda x: x.clone(), goal)

    table = _CUDA_TABLE if torch.cuda.is_available() else _CPU_TABLE
    return [case(kind, *row) for row in table for kind in _DTYPES]


def permutations(draw: random.Random, scale: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Random shapes of rank 2 to 5, 16 to 96 MB (1 to 2 MB if ``scale`` is not 1), sizes log-uniform, each with a permutation and a
    dtype's key."""
    low, high = (16 << 20, 96 << 20) if scale == 1 else (1 << 20, 2 << 20)
    while True:
        rank, kind = draw.randint(2, 5), draw.choice(["fp16", "fp32"])
        total = math.exp(draw.uniform(math.log(low), math.log(high))) / FLOATS[kind].itemsize
        cuts = [0, *sorted(draw.random() for _ in range(rank - 1)), 1]
        shape = tuple(max(2, round(total ** (b - a))) for a, b in zip(cuts, cuts[1:]))
        permutation = tuple(draw.sample(range(rank), rank))
        if permutation != tuple(range(rank)) and low <= math.prod(shape) * FLOATS[kind].itemsize <= 2 * high:
            yield shape, permutation, kind


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Cases of :func:`permutations`. The peer ``kernel`` calls the operator itself, which is timed also where the copy stays Inductor's."""
    for shape, permutation, kind in permutations(draw, scale):

        def inputs(device, dtype=FLOATS[kind], shape=shape):
            return (torch.randn(shape, device=device, dtype=dtype),)

        def fn(x, permutation=permutation):
            return x.permute(permutation).contiguous()

        def kernel(x, permutation=permutation):
            return functools.partial(permute_copy, x.permute(permutation), list(range(x.dim())))

        name = f"{kind} {'x'.join(map(str, shape))} ({''.join(map(str, permutation))})"
        yield Case(name, fn, inputs, lambda x: x.clone(), peers={"kernel": kernel})
