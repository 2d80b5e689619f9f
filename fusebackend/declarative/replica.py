"""Copies of tensors that a function may do with what it likes."""

from __future__ import annotations

import torch


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same values, strides, offset, and memory between its elements."""
    with torch.no_grad():
        if (
            tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        ):
            return like(tensor, tensor.detach().clone())
        memory = tensor.untyped_storage().clone()
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return like(tensor, new.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride()))


def like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` as a leaf that requires grad if ``old`` does."""
    return new.detach().requires_grad_(old.requires_grad)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes that the tensor lies in, those between its elements too."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
