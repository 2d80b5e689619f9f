"""What ``python -m fusebackend bench kernels`` times of this family: the backward of batch norm with the function behind it, its sums and
its gradient, and the result of a norm whose statistics are there; of images and of rows, random ones."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, size, tensor

aten = torch.ops.aten


def _wide(x: torch.Tensor) -> torch.Tensor:
    """What autocast makes of 16 bits before a batch norm; also in float64, in which the reference is computed."""
    return x.float() if x.dtype.itemsize == 2 else x


#: The function behind the norm, and its gradient: of the gradient of its result and of what it is given.
BEHIND: dict[str, tuple[Callable, Callable]] = {
    "none": (lambda u: u, lambda dy, u: dy),
    "relu": (torch.relu, lambda dy, u: aten.threshold_backward(dy, u, 0)),
    "silu": (torch.nn.functional.silu, aten.silu_backward),
    "hardswish": (torch.nn.functional.hardswish, aten.hardswish_backward),
    "gelu": (torch.nn.functional.gelu, aten.gelu_backward),
}


def _gradient(behind: str, dy, x, mean, scale, weight, bias):
    """The gradient before the function behind the norm, and the centred tensor."""
    centred = _wide(x) - mean
    return BEHIND[behind][1](_wide(dy), centred * scale * weight + bias), centred


def norm_sums(behind: str, dy, x, mean, scale, weight, bias):
    """The gradients of a batch norm's bias and of its weight, (..., channels) -> (channels,) each."""
    dz, centred = _gradient(behind, dy, x, mean, scale, weight, bias)
    dims = tuple(range(x.dim() - 1))
    return dz.sum(dims), (dz * centred).sum(dims) * scale


def norm_gradient(behind: str, dy, x, mean, scale, weight, bias, first, second):
    """The gradient of what a batch norm is given, whose two sums are there, (..., channels) -> the same."""
    dz, centred = _gradient(behind, dy, x, mean, scale, weight, bias)
    count = x.numel() // x.shape[-1]
    return ((dz - centred * (second / count * scale * scale) - first / count) * (scale * weight)).to(x.dtype)


def norm_result(behind: str, x, mean, scale, weight, bias):
    """A norm with the function behind it, whose statistics are there, (..., channels) -> the same."""
    return BEHIND[behind][0]((_wide(x) - mean) * scale * weight + bias).to(x.dtype)


#: Each with how many tensors, and how many vectors, it is given.
FORMS: dict[str, tuple[Callable, int, int]] = {"sums": (norm_sums, 2, 4), "gradient": (norm_gradient, 2, 6), "result": (norm_result, 1, 4)}


def _case(form: str, behind: str, kind: str, shape: tuple[int, ...]) -> Case:
    fn, tensors, vectors = FORMS[form]

    def inputs(device: torch.device) -> tuple:
        wide = torch.float64 if FLOATS[kind].itemsize == 8 else torch.float32
        return (
            *(tensor(shape, FLOATS[kind], device) for _ in range(tensors)),
            *(tensor(shape[-1:], wide, device) for _ in range(vectors)),
        )

    return Case(f"{form} {behind} {kind} {'x'.join(map(str, shape))}", functools.partial(fn, behind), inputs)


def cases() -> list[Case]:
    few = 1 if torch.cuda.is_available() else 32  # times fewer images
    shapes = [(256, 112, 112, 32), (256, 112, 112, 96), (256, 56, 56, 144), (256, 28, 28, 240), (256, 14, 14, 672), (256, 7, 7, 1152)]
    found = [_case(form, "silu", "bf16", (max(1, n // few), *rest)) for form in FORMS for n, *rest in shapes]
    found += [_case(form, behind, "bf16", (256 // few, 56, 56, 64)) for form in FORMS for behind in BEHIND if behind != "silu"]
    return found + [_case(form, "relu", "fp32", (128 // min(few, 128), 56, 56, 64)) for form in FORMS]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of rows and of images whose channels lie innermost."""
    while True:
        kind = draw.choice(list(FLOATS))
        form, behind = draw.choice(("sums", "sums", "gradient", "gradient", "result")), draw.choice(list(BEHIND))
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / FLOATS[kind].itemsize
        columns = size(draw, 2, min(4096, elements / 8))
        shape: tuple[int, ...] = (max(2, round(elements / columns)), columns)
        if draw.random() < 0.6:
            columns = 8 * size(draw, 1, 256)
            side = draw.choice((7, 8, 14, 16, 28, 32, 56, 64, 112))
            shape = (max(1, 8 * round(elements / columns / side**2 / 8)), side, side, columns)
        if LEAST_BYTES * min(scale, 1) <= math.prod(shape) * FLOATS[kind].itemsize <= MOST_BYTES * scale:
            yield _case(form, behind, kind, shape)
