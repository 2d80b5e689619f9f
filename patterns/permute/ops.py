"""The operator ``fusebackend::permute_copy`` and its reference in PyTorch. The kernels are in csrc/permute and csrc/common/tile."""

from __future__ import annotations

import torch

from fusebackend.native import arguments, ops


def reference(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """What the kernels compute.

    Args:
        x: a tensor of any dtype of 1 to 16 bytes and any strides.
        order: the result's dims from outermost to innermost in memory.

    Returns:
        The same bits, laid out as ``torch.empty_permuted(x.shape, order)``.
    """
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


def _fake(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    arguments.check_order("permute_copy", order, x.dim())
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


permute_copy = ops.define("permute_copy(Tensor x, int[] order) -> Tensor", fake=_fake)
