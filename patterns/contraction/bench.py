"""What ``python -m fusebackend bench kernels`` times of this family: the products of state-space models, and random ones."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, log_uniform

# Batch, chunks, positions in a chunk, heads, channels of a head, states.
_CUDA_SIZES, _CPU_SIZES = (4, 16, 64, 24, 64, 128), (2, 4, 64, 4, 32, 64)


def scores(c: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mamba-2's product of C and B, position by position, summed over states: (b,c,l,h,n), (b,c,s,h,n) -> (b,c,l,s,h)."""
    return (c[:, :, :, None] * b[:, :, None]).sum(-1)


def values(m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The scores applied to the values: (b,c,l,s,h), (b,c,s,h,p) -> (b,c,l,h,p)."""
    return (m[..., None] * x[:, :, None]).sum(3)


def states(b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The state of each chunk: (b,c,l,h,n), (b,c,l,h,p) -> (b,c,h,p,n)."""
    return (b[..., None, :] * x[..., None]).sum(2)


#: Each function with the einsum that it is, and the dims of its factors.
CASES: dict[str, tuple[Callable, str]] = {
    "scores": (scores, "bclhn,bcshn->bclsh"),
    "values": (values, "bclsh,bcshp->bclhp"),
    "states": (states, "bclhn,bclhp->bchpn"),
}


def cases() -> list[Case]:
    """Forward and backward of ``CASES``. The peer is ``torch.einsum``, which a user would write instead."""

    def case(name: str, kind: str, backward: tuple[int, ...], goals: dict[str, float]) -> Case:
        fn, equation = CASES[name]
        sizes = dict(zip("bclhpn", _CUDA_SIZES if torch.cuda.is_available() else _CPU_SIZES))
        sizes["s"] = sizes["l"]
        letters = equation.split("->")[0].split(",")

        def inputs(device: torch.device):
            return tuple(torch.randn([sizes[d] for d in dims], device=device, dtype=FLOATS[kind]) for dims in letters)

        peers = {} if backward else {"einsum": lambda x, y: functools.partial(torch.einsum, equation, x, y)}
        return Case(f"{kind} {name}{' backward' if backward else ''}", fn, inputs, peers=peers, backward=backward, goals=goals)

    goals = {("bf16", False): {"ms": 0.055}, ("bf16", True): {"ms": 0.075}} if torch.cuda.is_available() else {}
    relative = {"inductor": 0.3} if torch.cuda.is_available() else {}
    return [
        case(name, kind, backward, goals.get((kind, bool(backward)), relative) if name == "scores" else {})
        for kind in ("bf16", "fp32")
        for backward in ((), (0, 1))
        for name in CASES
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Products of 2^26 to 2^30 elements (times ``scale``) with up to two dims of each sort, in any order."""
    while True:
        sorts = ["batch", "left", "right", "summed"] + [s for s in ("batch", "left", "right", "summed") if draw.random() < 0.3]
        draw.shuffle(sorts)
        sizes = [max(2, round(log_uniform(draw, 2, 512))) for _ in sorts]
        if not 2**26 * scale <= math.prod(sizes) <= 2**30 * scale:
            continue
        kind = draw.choice(list(FLOATS))
        x, y = ([n if s in ("batch", "summed", own) else 1 for s, n in zip(sorts, sizes)] for own in ("left", "right"))
        dims = tuple(d for d, s in enumerate(sorts) if s == "summed")

        def inputs(device, x=x, y=y, dtype=FLOATS[kind]):
            return torch.randn(x, device=device, dtype=dtype), torch.randn(y, device=device, dtype=dtype)

        def fn(x, y, dims=dims):
            return (x * y).sum(dims)

        yield Case(f"{kind} {'x'.join(f'{n}{s[0]}' for s, n in zip(sorts, sizes))}", fn, inputs)
