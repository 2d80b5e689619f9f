"""What ``python -m fusebackend bench kernels`` times of this family: products of state-space models, and random ones."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform

#: Sequences, chunks, positions in a chunk (twice), heads, channels of a head, states.
_SIZES = dict(zip("bclshpn", (4, 16, 64, 64, 24, 64, 128)))
_EQUATIONS = {"scores": "bclhn,bcshn->bclsh", "values": "bclsh,bcshp->bclhp", "states": "bclhn,bclhp->bchpn"}


def cases() -> list[Case]:
    """None on a CPU, for which there are no kernels."""

    def case(name: str, kind: str) -> Case:
        equation = _EQUATIONS[name]
        return Case(f"{kind} {name}", _product(equation), _inputs(equation, _SIZES, FLOATS[kind]), static=True)

    return [case(name, kind) for kind in ("bf16", "fp32") for name in _EQUATIONS] if torch.cuda.is_available() else []


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Products of 8 to 128 rows, columns and terms, and 2 to 64 entries of the batch's inner dim, for which an operand is copied: mostly
    such as the kernels compute."""
    while True:
        kind = draw.choice(list(FLOATS))
        sizes = {d: _size(draw, 8, 128) for d in "mnk"} | {"h": _size(draw, 2, 64)}
        x, y, out = (draw.choice([*map("".join, itertools.permutations(dims))]) for dims in ("hmk", "hnk", "hmn"))
        if (x[0], y[0]) == ("h", "h") or y[-1] == "h" or (x[-1] == "h" and y[-1] != "n"):
            continue  # nothing is copied, or there is no kernel
        elements = sum(math.prod(sizes[d] for d in dims) for dims in (x, y, out))
        sizes["b"] = round(scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / (elements * FLOATS[kind].itemsize))
        if sizes["b"] < 2:
            continue
        equation = f"b{x},b{y}->b{out}"
        name = f"{kind} {equation} {' '.join(f'{d}{n}' for d, n in sizes.items())}"
        yield Case(name, _product(equation), _inputs(equation, sizes, FLOATS[kind]), static=True)


def _size(draw: random.Random, least: int, most: int) -> int:
    size = round(log_uniform(draw, least, most))
    return max(8, size // 8 * 8) if draw.random() < 0.95 else size


def _product(equation: str) -> Callable:
    return functools.partial(torch.einsum, equation)


def _inputs(equation: str, sizes: dict[str, int], dtype: torch.dtype) -> Callable:
    def inputs(device: torch.device):
        letters = equation.split("->")[0].split(",")
        return tuple(torch.randn([sizes[d] for d in dims], device=device, dtype=dtype) for dims in letters)

    return inputs
