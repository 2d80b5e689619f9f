"""What operators do to a convolution's results (csrc/common/channel_epilogue.h), in PyTorch, and what fakes refuse of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fusebackend.native import arguments

#: What may follow the convolution.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def finished(
    y: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    activation: str,
) -> torch.Tensor:
    """``activation((y - mean) / sqrt(variance + eps) * scale + shift)`` of (batch, channels, ...), with vectors of a number a channel."""

    def beside(vector: torch.Tensor) -> torch.Tensor:
        return vector.view(-1, *[1] * (y.dim() - 2))

    if mean is not None:
        y = y - beside(mean)
    if variance is not None:
        y = y * beside(torch.rsqrt(variance + eps))
    if scale is not None:
        y = y * beside(scale)
    if shift is not None:
        y = y + beside(shift)
    return ACTIVATIONS[activation](y) if activation else y


def check_epilogue(operator: str, x: torch.Tensor, channels: Any, activation: str, **vectors: torch.Tensor | None) -> None:
    """Refuses what csrc/common/channel_epilogue_binding.h refuses."""
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    for name, vector in vectors.items():
        if vector is not None:
            _check_vector(operator, name, vector, x, channels, sums)
    torch._check(not activation or activation in ACTIVATIONS, lambda: f"{operator}: activation {activation} is not supported")


def _check_vector(operator: str, name: str, vector: torch.Tensor, x: torch.Tensor, channels: Any, sums: torch.dtype) -> None:
    fits = arguments.same_sizes(vector.shape, [channels])
    torch._check(fits, lambda: f"{operator}: {name} must be ({channels},), got {tuple(vector.shape)}")
    torch._check(vector.dtype in (x.dtype, sums), lambda: f"{operator}: {name} must be {x.dtype} or {sums}, got {vector.dtype}")
    arguments.check_device(operator, x, **{name: vector})
