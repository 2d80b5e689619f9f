"""The operator ``fusebackend::max_pool_backward`` and its reference in PyTorch. The kernels are in csrc/max_pool_backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops

aten = torch.ops.aten

#: Those of gradients.
DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
#: As in csrc/max_pool_backward/max_pool_backward.h.
MAX_AXES, MAX_DIMS, MAX_ELEMENTS, MAX_PLACES, MAX_STEPS = 3, 8, 128, 2**29, 2**22


def reference(
    grad: torch.Tensor,
    offsets: torch.Tensor,
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    order: Sequence[int],
) -> torch.Tensor:
    """What the kernels compute: the gradient of the largest element of each window, of pooling along the last 1 to 3 dims.

    Args:
        grad: of float64, float32, float16 or bfloat16, of any strides: a number for each window.
        offsets: int8, of ``grad``'s sizes: which of the window's elements was the largest one, counted row by row. One that is no element
            of the window, or that stands in the padding, adds nothing.
        sizes: elements of the result along each of the pooled dims.
        kernel_size, stride, padding, dilation: numbers for each of them, as ``torch.nn.functional.max_pool2d`` takes them.
            A window has up to 128 elements.
        order: the dims of the result's memory, from the outermost to the innermost.

    Returns:
        A dense tensor of ``grad``'s dtype, and of its sizes but for those of the pooled dims. Sums are made in float32, in float64 for
        such a gradient, window by window, and rounded once.
    """
    axes = len(kernel_size)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    left, inside, place = offsets.long(), torch.ones_like(offsets, dtype=torch.bool), torch.zeros_like(offsets, dtype=torch.long)
    inside &= (left >= 0) & (left < math.prod(kernel_size))
    step = 1
    for axis in reversed(range(axes)):
        dim = grad.dim() - axes + axis
        windows = torch.arange(grad.shape[dim], device=grad.device).view([-1 if d == dim else 1 for d in range(grad.dim())])
        at = windows * stride[axis] - padding[axis] + left % kernel_size[axis] * dilation[axis]
        inside &= (at >= 0) & (at < sizes[axis])
        place += at * step
        left, step = left // kernel_size[axis], step * sizes[axis]
    kept = list(grad.shape[: grad.dim() - axes])
    rows, row = math.prod(kept), math.prod(grad.shape[grad.dim() - axes :])
    out = torch.zeros(rows, step, dtype=wide, device=grad.device)
    if out.numel() > 0:
        out.scatter_add_(1, torch.where(inside, place, 0).reshape(rows, row), torch.where(inside, grad.to(wide), 0).reshape(rows, row))
    shape = [*kept, *sizes]
    return torch.empty_strided(shape, arguments.dense_strides(shape, order), dtype=grad.dtype, device=grad.device).copy_(out.view(shape))


def _fake(
    grad: torch.Tensor,
    offsets: torch.Tensor,
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    order: Sequence[int],
) -> torch.Tensor:
    """Refuses what ``describe`` in csrc/max_pool_backward/binding.h refuses, and the binding."""
    name, rank, axes = "max_pool_backward", grad.dim(), len(kernel_size)
    torch._check(offsets.dtype == torch.int8, lambda: f"{name}: the offsets are {offsets.dtype}, not int8")
    same = arguments.same_sizes(offsets.shape, grad.shape)
    torch._check(same, lambda: f"{name}: offsets of sizes {tuple(offsets.shape)} for a gradient of {tuple(grad.shape)}")
    arguments.check_device(name, grad, offsets=offsets)
    torch._check(rank <= MAX_DIMS, lambda: f"{name}: {rank} dimensions; up to {MAX_DIMS} are accepted")
    most = min(MAX_AXES, rank)
    torch._check(0 < axes <= most, lambda: f"{name}: kernel_size={list(kernel_size)} of {axes} numbers; 1 to {most} are accepted")
    named = dict(sizes=sizes, stride=stride, padding=padding, dilation=dilation)
    for what, numbers in named.items():
        torch._check(len(numbers) == axes, lambda: f"{name}: {what}={list(numbers)}; {axes} numbers as of kernel_size are needed")  # noqa: B023
    torch._check(sorted(order) == list(range(rank)), lambda: f"{name}: order={list(order)} is no permutation of {rank} dimensions")
    torch._check(grad.dtype in DTYPES, lambda: f"{name}: {grad.dtype} is not supported")
    for what, numbers, least, most in (
        ("sizes", [g.hint(n) or 0 for n in sizes], 0, MAX_PLACES),
        ("kernel_size", kernel_size, 1, MAX_ELEMENTS),
        ("stride", stride, 1, MAX_STEPS),
        ("padding", padding, 0, MAX_PLACES),
        ("dilation", dilation, 1, MAX_STEPS),
    ):
        fits = all(least <= n <= most for n in numbers)
        torch._check(fits, lambda: f"{name}: {what}={list(numbers)}; {least} to {most} are accepted")  # noqa: B023
    elements = math.prod(kernel_size)
    torch._check(elements <= MAX_ELEMENTS, lambda: f"{name}: windows of {elements} elements; up to {MAX_ELEMENTS} are accepted")
    windows = [g.hint(n) or 0 for n in grad.shape[rank - axes :]]
    reach = max(n * step for n, step in zip(windows, stride))
    torch._check(reach <= 2 * MAX_PLACES, lambda: f"{name}: {windows} windows with stride={list(stride)} reach too far")
    shape = [*grad.shape[: rank - axes], *sizes]
    return grad.new_empty_strided(shape, arguments.dense_strides(shape, order))


def _on_cpu(*args: Any) -> torch.Tensor:
    _fake(*args)
    return reference(*args)


# Implemented by csrc/max_pool_backward on GPUs.
max_pool_backward = ops.define(
    "max_pool_backward(Tensor grad, Tensor offsets, SymInt[] sizes, int[] kernel_size, int[] stride, int[] padding, int[] dilation,"
    " int[] order) -> Tensor",
    fake=_fake,
    python_kernels={"CPU": _on_cpu},
)


def plan_facts(
    sizes: Sequence[int],
    strides: Sequence[int],
    offset_strides: Sequence[int],
    axis_sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
    multiprocessors: int,
    misaligned: int = 0,
) -> Mapping[str, float]:
    """How a GPU computes it (csrc/max_pool_backward/max_pool_backward.h, ``Plan``), of tensors that need not exist.

    Args:
        sizes, strides: of the gradient.
        offset_strides: of the offsets.
        multiprocessors: of the GPU.
        misaligned: how many bytes behind an aligned address the gradient begins.
    """
    return _plan(
        list(sizes),
        list(strides),
        list(offset_strides),
        list(axis_sizes),
        list(kernel_size),
        list(stride),
        list(padding),
        list(dilation),
        list(order),
        dtype,
        multiprocessors,
        misaligned,
    )


# Implemented by csrc/max_pool_backward/bind.cpp. Not for graphs.
_plan = ops.define_facts(
    "max_pool_backward_plan(int[] sizes, int[] strides, int[] offset_strides, int[] axis_sizes, int[] kernel_size, int[] stride,"
    " int[] padding, int[] dilation, int[] order, ScalarType dtype, int multiprocessors,"
    " int misaligned) -> str"
)
