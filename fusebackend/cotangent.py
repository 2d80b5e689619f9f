"""The incoming gradient with which two computations of the same backward are compared."""

from __future__ import annotations

import torch


def cotangent(output: torch.Tensor) -> torch.Tensor:
    """A gradient for ``output`` that differs from element to element and is the same at every call."""
    steps = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
    return torch.cos(steps).reshape(output.shape).to(output.dtype)
