"""What ``python -m fusebackend bench kernels`` times of this family: the weights of layers, their gradients, random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench import random_shapes
from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, tensor

_MOST_TENSORS = 300


def cases() -> list[Case]:
    """Beside PyTorch's own kernel for many tensors, which copies into tensors that are there."""
    fewer = 1 if torch.cuda.is_available() else 12
    return [
        _case("24 layers of 512 channels, fp32 to bf16", _layer(512) * (24 // fewer), "fp32", "bf16"),
        _case("24 layers of 512 channels, bf16 to fp32", _layer(512) * (24 // fewer), "bf16", "fp32"),
        _case("12 layers of 768 channels, fp32 to fp16", _layer(768) * (12 // fewer), "fp32", "fp16"),
        _case("100 biases of 768, fp32 to bf16", [(768,)] * 100, "fp32", "bf16"),
    ]


def _layer(channels: int) -> list[tuple[int, ...]]:
    """The weights and biases of a transformer's layer."""
    widths = [(3 * channels, channels), (channels, channels), (4 * channels, channels), (channels, 4 * channels)]
    return [size for shape in widths for size in (shape, shape[:1])]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of 2 to 300 tensors, of which some are alike, as layers are."""
    while True:
        before, after = draw.choice((("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")))
        count = round(log_uniform(draw, 2, _MOST_TENSORS))
        moved = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES)
        elements = max(count, moved / 6)  # four bytes and two are moved for each
        ranks = [draw.choice((1, 2, 2, 3)) for _ in range(draw.randint(1, 8))]
        kinds = [random_shapes.shape(draw, rank, log_uniform(draw, 1, elements / count)) for rank in ranks]
        shapes = [draw.choice(kinds) for _ in range(count)]
        if 6 * sum(map(math.prod, shapes)) <= MOST_BYTES * scale:
            yield _case(f"{before} to {after} {count} of {'x'.join(map(str, max(kinds, key=math.prod)))}", shapes, before, after)


def _case(name: str, shapes: list[tuple[int, ...]], before: str, after: str) -> Case:
    dtype = FLOATS[after]

    def cast(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.to(dtype) for t in tensors]

    def foreach_copy(*tensors: torch.Tensor) -> Callable[[], object]:
        results = [torch.empty_like(t, dtype=dtype) for t in tensors]
        return lambda: torch._foreach_copy_(results, tensors)

    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        return tuple(tensor(shape, FLOATS[before], device) for shape in shapes)

    return Case(name, cast, inputs, peers={"_foreach_copy_": foreach_copy}, static=True)
