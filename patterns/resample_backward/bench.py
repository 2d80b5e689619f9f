"""What ``python -m fusebackend bench kernels`` times of this family: gradients of interpolations, of models and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, size, tensor

_DIMS = {"linear": 1, "nearest": 2, "bilinear": 2, "bicubic": 2, "trilinear": 3}


def cases() -> list[Case]:
    cuda = torch.cuda.is_available()
    few = 1 if cuda else 16

    def case(kind: str, mode: str, factor: float, shape: tuple[int, ...], channels_last: bool = False, inductor: float = 1.0) -> Case:
        shape = (max(shape[0] // few, 1), *shape[1:])
        return _case(kind, mode, factor, shape, channels_last, {"inductor": inductor} if cuda else {})

    return [
        case("bf16", "bilinear", 2, (32, 128, 64, 64), inductor=0.2),
        case("bf16", "bilinear", 2, (32, 128, 64, 64), channels_last=True, inductor=0.2),
        case("bf16", "bilinear", 4, (8, 256, 32, 32), inductor=0.2),
        case("bf16", "nearest", 2, (16, 320, 32, 32), inductor=0.5),
        case("bf16", "nearest", 2, (16, 320, 32, 32), channels_last=True, inductor=0.5),
        case("fp32", "bicubic", 2, (16, 64, 128, 128), inductor=0.2),
        case("fp32", "trilinear", 2, (2, 32, 32, 64, 64), inductor=0.2),
        case("fp32", "linear", 2, (16, 64, 16384), inductor=0.5),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of all modes, to larger sizes and to smaller ones, in both memory orders."""
    while True:
        kind, mode = (
            draw.choice(list(FLOATS)),
            draw.choice(("nearest", "nearest", "bilinear", "bilinear", "bilinear", "bicubic", "linear", "trilinear")),
        )
        dims, dtype = _DIMS[mode], FLOATS[kind]
        if mode == "nearest":
            dims = draw.choice((2, 2, 3))
        factor = draw.choice((2, 2, 2, 4, 8, 1.5, 0.5))
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES / 2) / dtype.itemsize / max(factor, 1) ** dims
        side = min(size(draw, 4, 4096 if dims == 1 else 256), max(round((elements / 4) ** (1 / dims)), 2))
        channels = size(draw, 1, min(1024, max(elements / side**dims, 1.5)))
        if draw.random() < 0.7:
            channels = 8 * -(-channels // 8)
        shape = (max(1, round(elements / side**dims / channels)), channels, *[side] * dims)
        moved = math.prod(shape) * max(factor, 1) ** dims * dtype.itemsize
        if min(int(side * factor), side) > 0 and LEAST_BYTES * min(scale, 1) <= moved <= MOST_BYTES / 2 * scale:
            yield _case(kind, mode, factor, shape, dims == 2 and draw.random() < 0.5, {})


def _case(kind: str, mode: str, factor: float, shape: tuple[int, ...], channels_last: bool, goals: dict[str, float]) -> Case:
    def inputs(device: torch.device) -> tuple[torch.Tensor]:
        x = tensor(shape, FLOATS[kind], device)
        return (x.to(memory_format=torch.channels_last) if channels_last else x,)

    fn = _Interpolation(factor, mode)
    name = f"{kind} {mode} by {factor:g} of {'x'.join(map(str, shape))}{', channels last' if channels_last else ''}"
    return Case(name, fn, inputs, goals=goals, backward=(0,))


class _Interpolation(torch.nn.Module):
    """A module, whose numbers are constants under ``dynamic=True`` too. As an argument the factor would be a symbol, which
    ``F.interpolate`` does not take: Dynamo would run it outside of the graph."""

    def __init__(self, factor: float, mode: str) -> None:
        super().__init__()
        self.factor, self.mode = factor, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=self.factor, mode=self.mode, align_corners=None if self.mode == "nearest" else False)
