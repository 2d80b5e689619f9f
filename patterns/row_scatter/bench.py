"""What ``python -m fusebackend bench kernels`` times of this family: DeBERTa's relative positions, indices of their own, random sums."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, size, tensor


def relative_positions(length: int, buckets: int, most: int) -> torch.Tensor:
    """Of each pair of ``length`` tokens, from 0 to ``2 * buckets - 1``: far ones share a bucket, the farther the more (DeBERTa v2)."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    middle = buckets // 2
    far = distance.abs().clamp(min=middle).double()
    log = torch.ceil(torch.log(far / middle) / math.log((most - 1) / middle) * (middle - 1)) + middle
    bucket = torch.where(distance.abs() <= middle, distance, (log * distance.sign()).long())
    return (bucket + buckets).clamp(0, 2 * buckets - 1)


def gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Scores by position: the backward of the gather is the sum. What is summed is computed, as it is in a model."""
    shape = (*x.shape[:-1], index.shape[-1])
    return torch.gather(x, -1, index.expand(shape)) / 9.8125


def gathered_transposed(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return gathered(x, index).mT.contiguous()


def cases() -> list[Case]:
    """The floor is a copy of the gradient, which moves as many bytes as are read and written where there are as many bins as sources."""
    cuda = torch.cuda.is_available()
    heads, length = (192, 512) if cuda else (12, 128)

    def case(
        name: str, kind: str, fn: Callable, shape: tuple[int, ...], index: Callable[[], torch.Tensor], goals: dict[str, float]
    ) -> Case:
        def inputs(device: torch.device):
            return tensor(shape, FLOATS[kind], device), index().to(device)

        return Case(f"{kind} {name} {'x'.join(map(str, shape))}", fn, inputs, goals=goals if cuda else {}, backward=(0,))

    def positions() -> torch.Tensor:
        return relative_positions(length, length // 2, length)[None]

    def own() -> torch.Tensor:
        return torch.randint(length, (heads // 3, length, length))

    scores = (heads, length, length)
    return [
        case("DeBERTa c2p", "bf16", gathered, scores, positions, {"ms": 0.09}),
        case("DeBERTa p2c", "bf16", gathered_transposed, scores, positions, {"ms": 0.12}),
        case("DeBERTa c2p", "fp32", gathered, scores, positions, {"ms": 0.18}),
        case("an index of its own", "bf16", gathered, (heads // 3, length, length), own, {"inductor": 1.0}),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of sources that are there or computed, along rows or across them, onto zeros or a tensor; by an index that rows share, or not."""
    while True:
        kind, form = draw.choice(list(FLOATS)), draw.choice(("tensor", "tensor", "product", "transposed", "transposed product"))
        dtype = FLOATS[kind]
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES / 2) / dtype.itemsize
        sources, bins = (min(4096, size(draw, 4, min(4096, max(elements / 4, 5)))) for _ in range(2))
        if draw.random() < 0.4:
            bins = sources
        rows = max(1, round(elements / max(sources, bins)))
        copies = draw.choice((1, 1, min(size(draw, 2, 512), rows), min(size(draw, 2, 512), rows)))
        own = max(2, rows // copies)  # one row of the index for all is the family index_add's
        shape = (copies, own, sources)
        if not LEAST_BYTES * min(scale, 1) <= copies * own * max(sources, bins) * dtype.itemsize <= MOST_BYTES / 2 * scale:
            continue
        onto_zeros = draw.random() < 0.8
        index = draw.choice(("even", "near", "few"))
        name = f"{kind} {'x'.join(map(str, shape))} into {bins}, {index}, a {form} onto {'zeros' if onto_zeros else 'a tensor'}"
        yield _case(name, form, shape, bins, dtype, onto_zeros, index)


def _case(name: str, form: str, shape: tuple[int, int, int], bins: int, dtype: torch.dtype, onto_zeros: bool, index: str) -> Case:
    copies, own, sources = shape

    def inputs(device: torch.device):
        if index == "even":
            i = torch.randint(bins, (1, own, sources), device=device)
        elif index == "near":  # as relative positions are
            i = (torch.arange(own, device=device)[:, None] + torch.arange(sources, device=device) // 2)[None] % bins
        else:
            i = torch.randint(max(bins // 16, 1), (1, own, sources), device=device)
        x = tensor((copies, sources, own) if form.startswith("transposed") else shape, dtype, device)
        return (x, i) if onto_zeros else (x, i, tensor((copies, own, bins), dtype, device))

    def fn(x, i, start=None):
        x = x * 0.5 if form.endswith("product") else x
        x = x.mT if form.startswith("transposed") else x
        start = x.new_zeros(copies, own, bins) if start is None else start
        return start.scatter_add(-1, i.expand(x.shape), x)

    return Case(name, fn, inputs)
