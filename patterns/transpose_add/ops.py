"""The operator ``fusebackend::transpose_add`` and its reference in PyTorch. The kernels are in csrc/transpose_add and csrc/common/tile."""

from __future__ import annotations

import torch

from fusebackend.native import arguments, ops

#: Those that the kernels add.
DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)


def reference(x: torch.Tensor, y: torch.Tensor, alpha: float, ialpha: int, order: list[int]) -> torch.Tensor:
    """What the kernels compute.

    Args:
        x, y: tensors of one dtype on one device, of shapes that broadcast to each other; any strides.
        alpha, ialpha: the factor of ``y``, for floating-point and for integer dtypes; the other one is not read.
        order: the result's dims from outermost to innermost in memory.

    Returns:
        ``x + alpha * y``, computed in fp32 for 16-bit floats and rounded once, laid out as
        ``torch.empty_permuted(shape, order)``. It has the bits that ``torch.add`` gives, except for 16-bit floats on the CPU with
        an alpha that is no power of two: there eager's kernel for strided operands rounds alpha, the product and the
        sum to 16 bits, its kernel for contiguous ones only the sum; Inductor's code rounds once, as this does.
    """
    if not x.is_floating_point():
        out = torch.add(x, y, alpha=ialpha)
    elif x.itemsize == 2:
        wide = x.float(), y.float()
        # A GPU's kernels, PyTorch's among them, do not round the product.
        out = (torch.add(*wide, alpha=alpha) if x.is_cuda else wide[0] + wide[1] * alpha).to(x.dtype)
    else:
        out = torch.add(x, y, alpha=alpha)
    return torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device).copy_(out)


def _fake(x: torch.Tensor, y: torch.Tensor, alpha: float, ialpha: int, order: list[int]) -> torch.Tensor:
    arguments.check_dtype("transpose_add", x, y=y)
    torch._check(x.dtype in DTYPES, lambda: f"transpose_add: {x.dtype} is not supported")
    arguments.check_device("transpose_add", x, y=y)
    shape = arguments.broadcast_shape("transpose_add", x.shape, y.shape)
    arguments.check_order("transpose_add", order, len(shape))
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


transpose_add = ops.define(
    "transpose_add(Tensor x, Tensor y, float alpha, int ialpha, int[] order) -> Tensor",
    fake=_fake,
)
