"""The operator ``fusebackend::column_sum`` and its reference in PyTorch. The kernels are in csrc/column_sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusebackend.native import ops

#: Those that the kernels sum, and in which they return sums.
DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


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
    wide = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    found = x.to(wide).sum(list(range(begin, end)))
    if mean:
        found = found / _count(x.shape[begin:end])
    return found.to(dtype).contiguous()


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


# Implemented by csrc/column_sum.
column_sum = ops.define(
    "column_sum(Tensor x, int begin, int end, bool mean, ScalarType dtype) -> Tensor",
    fake=_fake,
    layout=torch.Tag.needs_exact_strides,
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
) -> Mapping[str, float]:
    """How a GPU computes the sum (csrc/column_sum/column_sum.h, ``Plan``), for a tensor that need not exist.

    Args:
        misaligned: how many bytes behind an aligned address it begins.
    """
    return _plan(list(sizes), list(strides), begin, end, dtype, result, multiprocessors, misaligned)


# Implemented by csrc/column_sum/bind.cpp.
_plan = ops.define_facts(
    "column_sum_plan(int[] sizes, int[] strides, int begin, int end, ScalarType dtype, ScalarType result, int multiprocessors,"
    " int misaligned) -> str"
)
