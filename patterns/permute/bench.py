"""What ``python -m fusebackend bench kernels`` times of this family: the table of README.md, and random shapes."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import DTYPES, LEAST_BYTES, MOST_BYTES, log_uniform, shape, tensor
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


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Copies of rank 2 to 5, some of slices. The peer ``kernel`` calls the operator itself, which is timed also where the copy stays
    Inductor's."""
    while True:
        rank, kind = draw.randint(2, 5), draw.choice(list(DTYPES))
        dtype = DTYPES[kind]
        sizes = shape(draw, rank, scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / dtype.itemsize)
        permutation = tuple(draw.sample(range(rank), rank))
        kept = [d for d in permutation if sizes[d] > 1]
        if kept == sorted(kept) or not LEAST_BYTES * min(scale, 1) <= math.prod(sizes) * dtype.itemsize <= MOST_BYTES * scale:
            continue
        cut = draw.choice((0, 0, 0, 1))

        def inputs(device, dtype=dtype, sizes=sizes, cut=cut):
            return (tensor((*sizes[:-1], sizes[-1] + 3 * cut), dtype, device),)

        def fn(x, permutation=permutation, cut=cut, last=sizes[-1]):
            x = x.narrow(-1, 2, last) if cut else x
            return x.permute(permutation).contiguous()

        def kernel(x, permutation=permutation, cut=cut, last=sizes[-1]):
            x = x.narrow(-1, 2, last) if cut else x
            return functools.partial(permute_copy, x.permute(permutation), list(range(x.dim())))

        name = f"{kind} {'x'.join(map(str, sizes))} ({''.join(map(str, permutation))}){' cut' * cut}"
        yield Case(name, fn, inputs, lambda x: x.clone(), peers={"kernel": kernel})
