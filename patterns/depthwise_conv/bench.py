"""What ``python -m fusebackend bench kernels`` times of this family: the cases of its page, and random shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, size


def cases() -> list[Case]:
    """Convolutions of ConvNeXt, MobileNet, EfficientNet and RepLKNet, and a dilated one along time; each forward and backward."""
    fp32, bf16 = torch.float32, torch.bfloat16
    if not torch.cuda.is_available():
        return [
            *_both("7x7 fp32 (2, 32, 14, 14)", (2, 32, 14, 14), 7, fp32),
            *_both("3x3 bf16 (2, 32, 28, 28)", (2, 32, 28, 28), 3, bf16),
            _normed((2, 32, 28, 28), 3, fp32, channels_last=True),
        ]
    wide, narrow = (128, 96, 56, 56), (128, 384, 14, 14)
    return [
        *_both("7x7 bf16 (128, 96, 56, 56)", wide, 7, bf16, goals=(0.085, 0.20)),
        *_both("7x7 bf16 (128, 96, 56, 56) channels last", wide, 7, bf16, channels_last=True, goals=(0.085, 0.20)),
        *_both("7x7 bf16 (128, 384, 14, 14)", narrow, 7, bf16, goals=(0.025, 0.060)),
        *_both("7x7 bf16 (128, 384, 14, 14) channels last", narrow, 7, bf16, channels_last=True),
        *_both("7x7 bf16 (128, 768, 7, 7)", (128, 768, 7, 7), 7, bf16),
        *_both("7x7 fp32 (64, 96, 56, 56) channels last", (64, 96, 56, 56), 7, fp32, channels_last=True),
        *_both("7x7 fp32 (64, 96, 56, 56)", (64, 96, 56, 56), 7, fp32, goals=(0.075, 0.20)),
        *_both("3x3 bf16 (128, 144, 56, 56)", (128, 144, 56, 56), 3, bf16, goals=(0.065, 0.12)),
        *_both("3x3 bf16 (128, 144, 56, 56) channels last", (128, 144, 56, 56), 3, bf16, channels_last=True, goals=(0.065, 0.12)),
        *_both("3x3 bf16 (128, 144, 56, 56) stride 2", (128, 144, 56, 56), 3, bf16, stride=2, goals=(0.041, 0.075)),
        *_both("5x5 bf16 (128, 144, 56, 56) stride 2", (128, 144, 56, 56), 5, bf16, stride=2),
        *_both("5x5 bf16 (128, 240, 28, 28)", (128, 240, 28, 28), 5, bf16, goals=(0.030, 0.075)),
        *_both("31x31 bf16 (32, 128, 56, 56)", (32, 128, 56, 56), 31, bf16, goals=(0.40, 1.0)),
        *_both("1x3 bf16 (16, 512, 4096) dilation 8", (16, 512, 4096), 3, bf16, dilation=8, goals=(0.040, 0.085)),
        _normed((128, 144, 56, 56), 3, bf16, channels_last=True),
        _normed((128, 144, 56, 56), 3, bf16),
        _normed((128, 96, 112, 112), 3, bf16, channels_last=True, stride=2),
        _normed((128, 240, 28, 28), 5, bf16, channels_last=True),
        _normed((128, 240, 28, 28), 5, bf16),
    ]


def _both(
    name: str,
    shape: tuple[int, ...],
    taps: int,
    dtype: torch.dtype,
    *,
    channels_last: bool = False,
    stride: int = 1,
    dilation: int = 1,
    goals: tuple[float, float] | None = None,
) -> Iterator[Case]:
    inputs = _inputs(shape, (taps,) * (len(shape) - 2), shape[1], dtype, channels_last)
    fn = _Convolution(shape[1], stride, taps // 2 * dilation, dilation)

    def copy(x, weight, bias):
        return x.detach().clone()

    forward, backward = ({"ms": goal} for goal in goals) if goals else ({}, {})
    yield Case(f"{name}, forward", fn, inputs, copy, goals=forward)
    yield Case(f"{name}, backward", fn, inputs, copy, goals=backward, backward=(0, 1))


def _normed(shape: tuple[int, ...], taps: int, dtype: torch.dtype, *, channels_last: bool = False, stride: int = 1) -> Case:
    """A block of EfficientNet in inference: batch norm and SiLU follow."""
    inputs = _inputs(shape, (taps, taps), shape[1], dtype, channels_last, normed=True)
    form = f"{' channels last' if channels_last else ''}{' stride 2' if stride == 2 else ''}"
    name = f"{taps}x{taps} {'fp32' if dtype == torch.float32 else 'bf16'} {shape}{form}, batch norm and SiLU"
    return Case(name, _Convolution(shape[1], stride, taps // 2, 1), inputs, lambda x, *rest: x.detach().clone())


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Endless: one direction each; two in three as models have them, the rest of any form."""
    while True:
        kind, batch, channels, side = draw.choice(list(FLOATS)), size(draw, 1, 256), size(draw, 8, 1536), size(draw, 5, 160)
        plain, flat = draw.random() < 0.66, draw.random() < 0.15
        taps = draw.choice((3, 3, 3, 5, 5, 7, 7, 9, 31) if plain else (1, 2, 3, 4, 5, 6, 9, 11, 13, 15, 21))
        other = taps if plain or draw.random() < 0.5 else draw.choice((1, 3, 5, 7))
        stride, dilation = draw.choice((1, 1, 2) if plain else (1, 2, 3)), 1 if plain else draw.choice((1, 1, 2, 3))
        multiplier = 1 if plain or draw.random() < 0.7 else 2
        if flat:
            side, stride, dilation = side * 20, draw.choice((1, 2)), draw.choice((2, 4, 8))
        sides = (side,) if flat else (side, max(1, side + draw.choice((0, 0, 0, -3, 5))))
        elements = batch * channels * sides[0] * (1 if flat else sides[1]) / scale
        window = (taps,) if flat else (taps, other)
        products = elements * taps * (1 if flat else other)
        if (
            not 2**16 <= elements <= 2**26
            or products > 2**33
            or min(sides) < (max(window) - 1) * dilation + 1 - 2 * (max(window) // 2 * dilation)
        ):
            continue
        channels_last, backward = not flat and draw.random() < 0.5, draw.choice(((), (), (0,), (1,), (0, 1), (0, 1)))
        normed = not backward and draw.random() < 0.4
        inputs = _inputs((batch, channels, *sides), window, channels * multiplier, FLOATS[kind], channels_last, normed)
        fn = _Convolution(channels, stride, max(window) // 2 * dilation, dilation)
        form = f"{'x'.join(map(str, window))} s{stride} d{dilation} m{multiplier}{' channels last' if channels_last else ''}"
        direction = f"backward of {' and '.join('xw'[i] for i in backward)}" if backward else "forward"
        direction += ", batch norm and SiLU" if normed else ""
        yield Case(f"{kind} {(batch, channels, *sides)} {form}, {direction}", fn, inputs, backward=backward)


def _inputs(
    shape: tuple[int, ...], taps: tuple[int, ...], outputs: int, dtype: torch.dtype, channels_last: bool, normed: bool = False
) -> Callable[[torch.device], tuple]:
    def inputs(device: torch.device) -> tuple:
        x = torch.randn(shape, device=device).to(dtype)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        weight = torch.randn(outputs, 1, *taps, device=device).div(len(taps) * taps[-1]).to(dtype)
        parameters = [torch.nn.Parameter(t) for t in (weight, torch.randn(outputs, device=device).to(dtype))]
        variance = [torch.rand(outputs, device=device).add(0.5).to(dtype)] if normed else []
        return x.requires_grad_(), *parameters, *variance

    return inputs


class _Convolution(torch.nn.Module):
    """A convolution, and if there is a variance batch norm in inference and SiLU. Its numbers are a module's, as in models: numbers of a
    function's closure are symbols where sizes are."""

    def __init__(self, channels: int, *numbers: int):
        super().__init__()
        self.channels, self.numbers = channels, numbers

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, variance: torch.Tensor | None = None) -> torch.Tensor:
        y = (F.conv1d if x.dim() == 3 else F.conv2d)(x, weight, None, *self.numbers, self.channels)
        return y if variance is None else F.silu(F.batch_norm(y, bias.detach(), variance, bias, bias))
