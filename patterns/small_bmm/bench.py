"""What ``python -m fusebackend bench kernels`` times of this family: products of small square matrices, their gradients, random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform

_CUDA = [("fp32", 100_000, 16), ("bf16", 100_000, 16), ("fp32", 1_000_000, 4), ("fp32", 1_000_000, 3), ("fp32", 50_000, 32)]
_CPU = [("fp32", 10_000, 16), ("fp32", 100_000, 3)]
_GOALS = {("fp32", 16, False): 0.09, ("fp32", 16, True): 0.16}


def cases() -> list[Case]:
    """The floor is an elementwise sum, which reads two tensors and writes one of the same size."""

    def case(kind: str, batch: int, size: int, backward: bool) -> Case:
        def inputs(device: torch.device):
            return tuple(torch.randn(batch, size, size, device=device).to(FLOATS[kind]) for _ in range(2))

        name = f"{kind} {batch}x{size}x{size}{' backward' if backward else ''}"
        goal = _GOALS.get((kind, size, backward)) if torch.cuda.is_available() else None
        goals = {} if goal is None else {"ms": goal}
        floor = None if backward else torch.add
        return Case(name, torch.bmm, inputs, floor, goals=goals, backward=(0, 1) if backward else ())

    return [case(*row, backward) for row in (_CUDA if torch.cuda.is_available() else _CPU) for backward in (False, True)]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Products of 1 to 32 rows, columns and terms, half of the sizes multiples of four; either operand transposed or not."""
    while True:
        kind = draw.choice(list(FLOATS))
        m, n, k = (_size(draw) for _ in range(3))
        if draw.random() < 0.5:
            m = n = k
        a_transposed, b_transposed = draw.random() < 0.3, draw.random() < 0.3
        itemsize = FLOATS[kind].itemsize
        batch = round(scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / ((m * k + k * n + m * n) * itemsize))
        if batch < 2:
            continue
        name = f"{kind} {batch} of {m}x{n}x{k} {'NT'[a_transposed]}{'NT'[b_transposed]}"
        yield Case(name, _product(a_transposed, b_transposed), _inputs(batch, m, n, k, a_transposed, b_transposed, FLOATS[kind]))


def _size(draw: random.Random) -> int:
    size = round(log_uniform(draw, 2, 32))
    return max(4, size // 4 * 4) if draw.random() < 0.6 else size


def _product(a_transposed: bool, b_transposed: bool) -> Callable:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(a.mT if a_transposed else a, b.mT if b_transposed else b)

    return product


def _inputs(batch: int, m: int, n: int, k: int, a_transposed: bool, b_transposed: bool, dtype: torch.dtype) -> Callable:
    def inputs(device: torch.device):
        a, b = (k, m) if a_transposed else (m, k), (n, k) if b_transposed else (k, n)
        return tuple(torch.randn(batch, *shape, device=device).to(dtype) for shape in (a, b))

    return inputs
