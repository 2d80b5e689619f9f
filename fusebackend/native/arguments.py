"""What fakes ask of their arguments, as the kernels' bindings do: a call that a kernel would refuse is refused while it is traced.

Sizes may be symbolic, and no question adds a guard. A relation of sizes holds if it is known to, or did when they were traced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusebackend import fx_utils as g
from fusebackend.native import ops


def are_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal."""
    return g.same_size(a, b) or g.hint(a) == g.hint(b) is not None


def same_sizes(a: Iterable[Any], b: Iterable[Any]) -> bool:
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(map(are_same, a, b))


def check_device(operator: str, like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """All ``tensors`` are on the device of ``like``."""
    for name, tensor in tensors.items():
        if tensor is not None:
            message = f"{operator}: {name} is on {tensor.device}, the others on {like.device}"
            torch._check(tensor.device == like.device, lambda: message)  # noqa: B023


def check_dtype(operator: str, x: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """All ``tensors`` have the dtype of the operand ``x``."""
    for name, tensor in tensors.items():
        if tensor is not None:
            message = f"{operator}: x is {x.dtype} and {name} is {tensor.dtype}; one dtype is needed"
            torch._check(tensor.dtype == x.dtype, lambda: message)  # noqa: B023


def is_contiguous(tensor: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if not g.same_size(size, 1) and not are_same(stride, expected):
            return 0 in (g.hints(tensor.shape) or ())
        expected = expected * size
    return True


def dense_strides(sizes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a dense tensor whose dims lie in this order, from the outermost to the innermost."""
    strides: list[Any] = [0] * len(sizes)
    step: Any = 1
    for d in reversed(order):
        strides[d] = step
        step = step if g.same_size(sizes[d], 0) else step * sizes[d]
    return strides


def covers_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in one gapless stretch of memory, in whatever order of dimensions."""
    sizes, strides = g.hints(tensor.shape), g.hints(tensor.stride())
    if sizes is None or strides is None:
        return tensor.is_contiguous()
    numel = math.prod(sizes)
    if not numel:
        return True
    return not is_expanded(tensor) and 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) == numel


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory along a dimension of stride 0."""
    return any(g.hint(stride) == 0 and g.hint(size) not in (0, 1) for size, stride in zip(tensor.shape, tensor.stride()))


# ---- permute_copy and transpose_add, whose bindings are those of csrc/common/tile ----


def tile_max_rank() -> int:
    """How many dimensions these kernels take. Without a library, whose operators nothing calls then, any number will do."""
    return ops.ask("tile_max_rank", default=64)


def broadcast_shape(operator: str, x: Sequence[Any], y: Sequence[Any]) -> list[Any]:
    """The shape of ``x + y``."""
    rank = max(len(x), len(y))
    shape = []
    for d, (a, b) in enumerate(zip([1] * (rank - len(x)) + list(x), [1] * (rank - len(y)) + list(y))):
        one = [g.same_size(n, 1) for n in (a, b)]
        torch._check(any(one) or are_same(a, b), lambda: f"{operator}: sizes {a} and {b} of dimension {d} do not broadcast")  # noqa: B023
        shape.append(b if one[0] else a)
    return shape


def check_order(operator: str, order: Sequence[int], rank: int) -> None:
    """``order`` names each of the result's dimensions once, and these are not too many."""
    torch._check(rank <= tile_max_rank(), lambda: f"{operator}: rank {rank} exceeds {tile_max_rank()}")
    torch._check(sorted(order) == list(range(rank)), lambda: f"{operator}: order={list(order)} is no permutation of {rank} dimensions")
