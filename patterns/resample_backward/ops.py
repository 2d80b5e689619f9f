"""The operator ``fusebackend::resample_backward`` and its reference in PyTorch. The kernels are in csrc/resample_backward."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops

aten = torch.ops.aten

HALVES = frozenset({torch.float16, torch.bfloat16})
#: Those that the kernels sum, and give.
DTYPES = frozenset({torch.float64, torch.float32, *HALVES})
INDEX_DTYPES = (torch.int64, torch.int32)
#: As in csrc/resample_backward/resample_backward.h.
MAX_AXES, MAX_TERMS, MAX_DIMS = 3, 4, 8


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which sums of a gradient of this dtype are made; that of the weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference(
    grad: torch.Tensor,
    dim: int,
    indices: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    terms: Sequence[int],
    sizes: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the kernels compute, the gradient of what reads ``out`` by products of indices, such as interpolation: along each axis
    ``out[..., index[i], ...] += weight[i] * grad[..., i, ...]`` for each of its terms.

    Args:
        grad: of float64, float32, float16 or bfloat16, of any strides.
        dim: the first axis. Axes follow one another.
        indices: for each axis its terms' (1 to 4), vectors of as many elements as ``grad`` has along it; int32 or int64, all alike.
            Negative ones count from the end. One out of range is an error: on CUDA a device assertion.
        weights: one for each of ``indices``, of float64 for such a gradient and of float32 for others; none where all are 1.
        terms: how many terms each axis (1 to 3) has.
        sizes: elements of the result along each axis.
        order: the dims of the result's memory, from the outermost to the innermost.
        dtype: of the result; float64 for such a gradient, any of the others for others.

    Returns:
        A dense tensor of ``grad``'s sizes but for those of the axes. Sums are made in float32, in float64 for such a gradient, and
        rounded once. The order of the additions depends on the indices alone.
    """
    wide = accumulator(grad.dtype)
    shape = [*grad.shape[:dim], *sizes, *grad.shape[dim + len(sizes) :]]
    out = torch.zeros(shape, dtype=wide, device=grad.device)
    factors = weights or [torch.ones(i.shape, dtype=wide, device=grad.device) for i in indices]
    ends = list(itertools.accumulate(terms, initial=0))
    for chosen in itertools.product(*map(range, ends, ends[1:])):
        value, places = grad.to(wide), []
        for axis, term in enumerate(chosen):
            value = value * _along(factors[term], dim + axis, grad.dim())
            places.append(_along(indices[term].long(), axis, len(sizes)))
        aten.index_put_(out, [*[None] * dim, *places], value, True)
    return torch.empty_strided(shape, arguments.dense_strides(shape, order), dtype=dtype, device=grad.device).copy_(out)


def _along(vector: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    return vector.view([-1 if d == axis else 1 for d in range(rank)])


def _fake(
    grad: torch.Tensor,
    dim: int,
    indices: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    terms: Sequence[int],
    sizes: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Refuses what ``describe`` in csrc/resample_backward/binding.h refuses, and the binding."""
    name, rank, axes = "resample_backward", grad.dim(), len(terms)
    torch._check(rank <= MAX_DIMS, lambda: f"{name}: {rank} dimensions; up to {MAX_DIMS} are accepted")
    message = f"{name}: {axes} axes and {len(sizes)} sizes; as many of both, 1 to {MAX_AXES}, are accepted"
    torch._check(0 < axes <= MAX_AXES and len(sizes) == axes, lambda: message)
    torch._check(0 <= dim and dim + axes <= rank, lambda: f"{name}: dim={dim} is out of range for {axes} axes of {rank} dimensions")
    torch._check(sorted(order) == list(range(rank)), lambda: f"{name}: order={list(order)} is no permutation of {rank} dimensions")
    supported = {grad.dtype, dtype} <= DTYPES and (grad.dtype == torch.float64) == (dtype == torch.float64)
    torch._check(supported, lambda: f"{name}: {grad.dtype} to {dtype} is not supported")
    fits = all(0 < n <= MAX_TERMS for n in terms)
    torch._check(fits, lambda: f"{name}: terms={list(terms)}; 1 to {MAX_TERMS} of an axis are accepted")
    torch._check(all(g.hint(n) is None or g.hint(n) >= 0 for n in sizes), lambda: f"{name}: sizes={list(sizes)}; none may be negative")
    torch._check(len(indices) == sum(terms), lambda: f"{name}: {len(indices)} indices for {sum(terms)} terms")
    torch._check(len(weights) in (0, len(indices)), lambda: f"{name}: {len(weights)} weights for {len(indices)} terms")
    first = indices[0].dtype
    torch._check(first in INDEX_DTYPES, lambda: f"{name}: the indices are {first}, not int32 or int64")
    lengths = [grad.shape[dim + axis] for axis, n in enumerate(terms) for _ in range(n)]
    for vectors, wanted in ((indices, first), (weights, accumulator(grad.dtype))):
        for vector, length in zip(vectors, lengths):
            torch._check(vector.dtype == wanted, lambda: f"{name}: a vector of {vector.dtype}; {wanted} is needed")  # noqa: B023
            fits = vector.dim() == 1 and arguments.are_same(vector.shape[0], length)
            torch._check(fits, lambda: f"{name}: indices and weights are vectors of the gradient's {length} elements")  # noqa: B023
            arguments.check_device(name, grad, vector=vector)
    shape = [*grad.shape[:dim], *sizes, *grad.shape[dim + axes :]]
    is_empty = 0 in [g.hint(n) for n in shape]
    torch._check(not is_empty or g.hint(grad.numel()) == 0, lambda: f"{name}: every index is out of range of a dimension of size 0")
    return grad.new_empty_strided(shape, arguments.dense_strides(shape, order), dtype=dtype)


def _on_cpu(*args: Any) -> torch.Tensor:
    _fake(*args)
    return reference(*args)


# Implemented by csrc/resample_backward on GPUs.
resample_backward = ops.define(
    "resample_backward(Tensor grad, int dim, Tensor[] indices, Tensor[] weights, int[] terms, SymInt[] sizes, int[] order,"
    " ScalarType dtype) -> Tensor",
    fake=_fake,
    python_kernels={"CPU": _on_cpu},
    indices={"indices": "sizes"},
)


def plan_facts(
    sizes: Sequence[int],
    strides: Sequence[int],
    dim: int,
    terms: Sequence[int],
    axis_sizes: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
    result: torch.dtype,
    multiprocessors: int,
    misaligned: int = 0,
) -> Mapping[str, float]:
    """How a GPU computes the sums (csrc/resample_backward/resample_backward.h, ``Plan``), of a gradient that need not exist.

    Args:
        sizes, strides: of the gradient.
        multiprocessors: of the GPU.
        misaligned: how many bytes behind an aligned address it begins.
    """
    return _plan(list(sizes), list(strides), dim, list(terms), list(axis_sizes), list(order), dtype, result, multiprocessors, misaligned)


# Implemented by csrc/resample_backward/bind.cpp. Not for graphs.
_plan = ops.define_facts(
    "resample_backward_plan(int[] sizes, int[] strides, int dim, int[] terms, int[] axis_sizes, int[] order, ScalarType dtype,"
    " ScalarType result, int multiprocessors, int misaligned) -> str"
)
