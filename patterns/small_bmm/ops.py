"""The operator ``fusebackend::small_bmm`` and its reference in PyTorch. The kernels are in csrc/small_bmm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusebackend.native import arguments, ops

#: Those that the kernels multiply.
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the kernels compute.

    Args:
        a, b: (batch, m, k) and (batch, k, n), of one dtype. Matrices that follow one another without a gap, each by rows or by columns, are
            read where they lie; others are copied. A library multiplies those with more than :func:`most_size` rows, columns or terms.

    Returns:
        ``a @ b``, contiguous. The terms of an element are added in fp32, in an order that the sizes and the dtype decide, and the sum is
        rounded once.
    """
    return torch.bmm(a.float(), b.float()).to(a.dtype)


def most_size() -> int:
    """The most rows, columns and terms. Without a library, whose operators nothing calls then, any number will do."""
    return ops.ask("small_bmm_most_size", default=1)


def is_transposed(sizes: Sequence[Any], strides: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool | None:
    """Whether matrices that follow one another without a gap lie by columns; None if there are gaps, or another order.

    Args:
        same: how two sizes are compared.
    """

    def lie(row: Any, column: Any) -> bool:
        wanted = (sizes[1] * sizes[2], row, column)
        return all(same(size, 1) or same(stride, w) for size, stride, w in zip(sizes, strides, wanted))

    if lie(sizes[2], 1):
        return False
    return True if lie(1, sizes[1]) else None


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch._check(a.dim() == 3 and b.dim() == 3, lambda: "small_bmm: a and b are batches of matrices, with three dims")
    arguments.check_dtype("small_bmm", a, b=b)
    torch._check(a.dtype in DTYPES, lambda: f"small_bmm: {a.dtype} is not supported")
    arguments.check_device("small_bmm", a, b=b)
    fit = arguments.are_same(a.shape[0], b.shape[0]) and arguments.are_same(a.shape[2], b.shape[1])
    torch._check(fit, lambda: f"small_bmm: {tuple(a.shape)} and {tuple(b.shape)} do not fit to one another")
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


# Implemented by csrc/small_bmm.
small_bmm = ops.define("small_bmm(Tensor a, Tensor b) -> Tensor", fake=_fake, layout=ops.UNPADDED)


def plan_facts(
    sizes: Sequence[int], transposed: Sequence[bool], dtype: torch.dtype, misaligned: Sequence[int] = (0, 0)
) -> Mapping[str, float]:
    """How a GPU computes products (csrc/small_bmm/small_bmm.h, ``Plan``), of tensors that need not exist.

    Args:
        sizes: batch, m, n, k.
        transposed: of both operands, whether their matrices lie by columns.
        misaligned: how many bytes behind an aligned address each begins.
    """
    return _plan(list(sizes), list(transposed), dtype, list(misaligned))


# Implemented by csrc/small_bmm/bind.cpp. They do not appear in graphs.
ops.define("small_bmm_most_size() -> int", fake=most_size)
_plan = ops.define_facts("small_bmm_plan(int[] sizes, bool[] transposed, ScalarType dtype, int[] misaligned) -> str")
