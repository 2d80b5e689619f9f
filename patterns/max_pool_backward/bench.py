"""What ``python -m fusebackend bench kernels`` times of this family: gradients of max pooling, of models and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, size, tensor

_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def cases() -> list[Case]:
    cuda = torch.cuda.is_available()
    few = 1 if cuda else 16

    def case(kind: str, windows: tuple[int, int, int], shape: tuple[int, ...], channels_last: bool = False, inductor: float = 1.0) -> Case:
        shape = (max(shape[0] // few, 1), *shape[1:])
        return _case(kind, windows, shape, channels_last, {"inductor": inductor} if cuda else {})

    return [
        case("bf16", (3, 2, 1), (128, 64, 112, 112), inductor=0.15),
        case("bf16", (3, 2, 1), (128, 64, 112, 112), channels_last=True, inductor=0.2),
        case("bf16", (2, 2, 0), (16, 64, 256, 256), inductor=0.5),
        case("bf16", (2, 2, 0), (16, 64, 256, 256), channels_last=True, inductor=0.5),
        case("bf16", (3, 1, 1), (64, 192, 35, 35), channels_last=True, inductor=0.3),
        case("fp32", (5, 1, 2), (16, 256, 40, 40), inductor=0.3),
        case("fp32", (2, 2, 0), (2, 32, 64, 128, 128), inductor=0.5),
        case("fp32", (3, 2, 1), (16, 256, 8192), inductor=0.5),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Along one to three dims, of windows that overlap or do not, in both memory orders."""
    while True:
        kind, dims = draw.choice(list(FLOATS)), draw.choice((2, 2, 2, 2, 1, 3))
        windows = draw.choice(((2, 2, 0), (2, 2, 0), (3, 2, 1), (3, 2, 1), (3, 2, 0), (3, 1, 1), (3, 3, 0), (5, 1, 2), (5, 2, 2)))
        if dims == 3 and windows[0] > 2:
            windows = (2, 2, 0)
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES / 2) / FLOATS[kind].itemsize
        side = min(size(draw, 8, 65536 if dims == 1 else 256), max(round((elements / 4) ** (1 / dims)), 8))
        channels = size(draw, 1, min(1024, max(elements / side**dims, 1.5)))
        if draw.random() < 0.7:
            channels = 8 * -(-channels // 8)
        shape = (max(1, round(elements / side**dims / channels)), channels, *[side] * dims)
        if LEAST_BYTES * min(scale, 1) <= math.prod(shape) * FLOATS[kind].itemsize <= MOST_BYTES / 2 * scale:
            yield _case(kind, windows, shape, dims == 2 and draw.random() < 0.5, {})


def _case(kind: str, windows: tuple[int, int, int], shape: tuple[int, ...], channels_last: bool, goals: dict[str, float]) -> Case:
    def inputs(device: torch.device) -> tuple[torch.Tensor]:
        x = tensor(shape, FLOATS[kind], device)
        return (x.to(memory_format=torch.channels_last) if channels_last else x,)

    kernel, stride, padding = windows
    name = f"{kind} {kernel} by {stride} of {'x'.join(map(str, shape))}{', channels last' if channels_last else ''}"
    # For windows of 25 elements Inductor compiles a kernel of symbolic sizes for minutes.
    return Case(name, _Pool(windows, len(shape) - 2), inputs, goals=goals, backward=(0,), static=kernel == 5)


class _Pool(torch.nn.Module):
    """A module, whose numbers are constants under ``dynamic=True`` too."""

    def __init__(self, windows: tuple[int, int, int], dims: int) -> None:
        super().__init__()
        self.windows, self.dims = windows, dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _POOLS[self.dims](x, *self.windows)
