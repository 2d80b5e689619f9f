"""The operators ``fusebackend::column_sum`` and ``column_sums`` and their references in PyTorch. The kernels are in csrc/column_sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusebackend.native import arguments, ops

#: Those that the kernels sum, and in which they return sums.
DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
#: Those of which they sum products.
PRODUCT_DTYPES = DTYPES - {torch.float64}


def reference(x: torch.Tensor, begin: int, end: int, mean: bool, dtype: torch.dtype) -> torch.Tensor:
    """What the kernels compute.

    Args:
        x: read where it lies if the dims before ``begin`` lie in memory like one dim, those from ``begin`` to ``end - 1`` too, and the
            others side by side; copied otherwise.
        begin, end: the dims that are summed: ``begin`` to ``end - 1``.
        mean: whether the sum is divided by the number of its terms.
        dtype: of the result.

    Returns:
        A contiguous tensor of the other dims. Sums are made in fp32, in fp64 where ``x`` or the result is fp64, and rounded once. The order
        of the additions depends on the shape, the strides and the device alone.
    """
    found = x.to(wide_dtype(x.dtype, dtype)).sum(list(range(begin, end)))
    if mean:
        found = found / _count(x.shape[begin:end])
    return found.to(dtype).contiguous()


def wide_dtype(dtype: torch.dtype, result: torch.dtype) -> torch.dtype:
    """In which a tensor of ``dtype`` is summed."""
    return torch.float64 if torch.float64 in (dtype, result) else torch.float32


def sums_reference(
    x: torch.Tensor,
    y: torch.Tensor | None,
    begin: int,
    end: int,
    dtype: torch.dtype | None,
    mean: bool,
    product_dtype: torch.dtype,
    product_mean: bool,
    rounded: bool,
) -> list[torch.Tensor]:
    """What the kernels of ``column_sums`` compute, in one pass.

    Args:
        x, y: of one shape and dtype, each read where it lies as for :func:`reference`. Without ``y`` the products are squares of ``x``.
        begin, end: the dims that are summed.
        dtype, mean: of the sum of ``x``, which is the first result; None if it is not wanted.
        product_dtype, product_mean: of the sum of ``x * y``, the last result.
        rounded: whether products are rounded to the dtype of ``x`` before they are added, as those of a graph in 16 bits are. Otherwise
            they are fp32; those of fp32 numbers may be added without being rounded.
    """
    wide_x, wide_y = x.float(), (x if y is None else y).float()
    product = wide_x * wide_y
    if rounded:
        product = product.to(x.dtype)
    found = [] if dtype is None else [reference(x, begin, end, mean, dtype)]
    return [*found, reference(product, begin, end, product_mean, product_dtype)]


def _count(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def merges(sizes: Sequence[Any], strides: Sequence[Any], same: Callable[[Any, Any], bool]) -> tuple[Any, Any] | None:
    """The size and the stride of the one dim like which these dims lie in memory; None if they do not. Dims of size 1 have no place.

    Args:
        same: how two sizes are compared.
    """
    count: Any = 1
    step: Any = None
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if same(size, 1):
            continue
        if step is None:
            step = stride
        elif not same(stride, count * step):
            return None
        count = count * size
    return count, step


def _fake(x: torch.Tensor, begin: int, end: int, mean: bool, dtype: torch.dtype) -> torch.Tensor:
    torch._check(0 <= begin < end <= x.dim(), lambda: f"column_sum: there are no dims {begin} to {end - 1} of {x.dim()}")
    supported = x.dtype in DTYPES and dtype in DTYPES
    torch._check(supported, lambda: f"column_sum: the sum of {x.dtype} in {dtype} is not supported")
    return torch.empty([*x.shape[:begin], *x.shape[end:]], dtype=dtype, device=x.device)


def _sums_fake(
    x: torch.Tensor,
    y: torch.Tensor | None,
    begin: int,
    end: int,
    dtype: torch.dtype | None,
    mean: bool,
    product_dtype: torch.dtype,
    product_mean: bool,
    rounded: bool,
) -> list[torch.Tensor]:
    if y is not None:
        arguments.check_dtype("column_sums", x, y=y)
        arguments.check_device("column_sums", x, y=y)
        same = arguments.same_sizes(x.shape, y.shape)
        torch._check(same, lambda: f"column_sums: x and y have one shape, not {tuple(x.shape)} and {tuple(y.shape)}")
    dtypes = [product_dtype] if dtype is None else [dtype, product_dtype]
    supported = {x.dtype, *dtypes} <= PRODUCT_DTYPES
    torch._check(supported, lambda: f"column_sums: products of {x.dtype} in {product_dtype} are not supported")
    return [_fake(x, begin, end, False, t) for t in dtypes]


# Implemented by csrc/column_sum.
column_sum = ops.define(
    "column_sum(Tensor x, int begin, int end, bool mean, ScalarType dtype) -> Tensor",
    fake=_fake,
    layout=ops.UNPADDED,
)
column_sums = ops.define(
    "column_sums(Tensor x, Tensor? y, int begin, int end, ScalarType? dtype, bool mean, ScalarType product_dtype, bool product_mean,"
    " bool rounded) -> Tensor[]",
    fake=_sums_fake,
    layout=ops.UNPADDED,
)


def plan_facts(
    sizes: Sequence[int],
    strides: Sequence[int],
    begin: int,
    end: int,
    dtype: torch.dtype,
    result: torch.dtype,
    multiprocessors: int,
    misaligned: int = 0,
    *,
    y_strides: Sequence[int] | None = None,
    plain: bool = True,
    products: bool = False,
    moments: bool = False,
) -> Mapping[str, float]:
    """How a GPU computes sums (csrc/column_sum/column_sum.h, ``Plan``), of tensors that need not exist.

    Args:
        misaligned: how many bytes behind an aligned address they begin.
        y_strides, plain, products: of a second tensor, and which sums are computed, as for :func:`sums_reference`.
        moments: not sums, but variances and means (patterns/column_moments).
    """
    y = None if y_strides is None else list(y_strides)
    return _plan(list(sizes), list(strides), y, begin, end, plain, products, moments, dtype, result, multiprocessors, misaligned)


# Implemented by csrc/column_sum/bind.cpp.
_plan = ops.define_facts(
    "column_sum_plan(int[] sizes, int[] strides, int[]? y_strides, int begin, int end, bool plain, bool products, bool moments,"
    " ScalarType dtype, ScalarType result, int multiprocessors, int misaligned) -> str"
)
