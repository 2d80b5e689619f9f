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
    """Products of 2^12 to 2^30 elements (2^30 times ``scale`` at most) with up to two dims of each sort, in any order, of factors in any
    memory order, some of which are computed first."""
    while True:
        most = 2 ** draw.uniform(12, 30 + math.log2(scale))
        sorts, sizes = _between(draw, most) if draw.random() < 0.4 else _any_dims(draw)
        if not most / 4 <= math.prod(sizes) <= most:
            continue
        kind = draw.choice(list(FLOATS))
        shapes = [[n if s in ("batch", "summed", own) else 1 for s, n in zip(sorts, sizes)] for own in ("left", "right")]
        if max(map(math.prod, shapes)) > 2**28 * scale:
            continue
        orders = [draw.sample(range(len(sorts)), len(sorts)) if draw.random() < 0.5 else list(range(len(sorts))) for _ in shapes]
        dims = tuple(d for d, s in enumerate(sorts) if s == "summed")
        computed = draw.random() < 0.25

        def inputs(device, shapes=shapes, orders=orders, dtype=FLOATS[kind]):
            return tuple(_in_memory_order(torch.randn(s, device=device, dtype=dtype), o) for s, o in zip(shapes, orders))

        yield Case(f"{kind} {'x'.join(f'{n}{s[0]}' for s, n in zip(sorts, sizes))}", _sum_of_products(dims, computed), inputs)


def _any_dims(draw: random.Random) -> tuple[list[str], list[int]]:
    """Sorts of dims, and their sizes."""
    sorts = ["batch", "left", "right", "summed"] + [s for s in ("batch", "left", "right", "summed") if draw.random() < 0.4]
    draw.shuffle(sorts)
    return sorts, [max(2, round(log_uniform(draw, 2, 1024))) for _ in sorts]


def _between(draw: random.Random, most: float) -> tuple[list[str], list[int]]:
    """The same of matrices in whole vectors, as for products in place: one dim of the batch is outermost, another stands anywhere."""
    sorts = ["batch", *draw.sample(("batch", "left", "right", "summed"), 4)]
    inner = [max(8, round(log_uniform(draw, 8, 128)) // 8 * 8) for _ in sorts[1:]]
    return sorts, [max(2, int(most / math.prod(inner))), *inner]


def _in_memory_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same, with the dims from the outermost to the innermost in memory as in ``order``."""
    return tensor.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def _sum_of_products(dims: tuple[int, ...], computed: bool) -> Callable:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x.sigmoid() if computed else x) * y).sum(dims)

    return fn
