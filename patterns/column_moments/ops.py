"""The operator ``fusebackend::column_moments`` and its reference in PyTorch. The kernels are in csrc/column_moments."""

from __future__ import annotations

import math

import torch

from fusebackend.native import ops
from fusebackend.patterns.column_sum.ops import DTYPES

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(x: torch.Tensor, begin: int, end: int, correction: float, epsilon: float, dtype: torch.dtype) -> _Three:
    """What the kernels compute.

    Args:
        x: read where it lies if the dims before ``begin`` lie in memory like one dim, those from ``begin`` to ``end - 1`` too, and the
            others side by side; copied otherwise.
        begin, end: the dims over which it is taken: ``begin`` to ``end - 1``.
        correction: the sum of squared distances to the mean is divided by the number of elements less this, or by 0 if that is negative.
        epsilon: is added to the variance below the root.
        dtype: of the results.

    Returns:
        The variance, the mean, and ``1 / sqrt(variance + epsilon)``, contiguous tensors of the other dims. All are computed in fp32, in
        fp64 where ``x`` or the results are fp64, and rounded once: four rows at a time, which are joined with those before (Chan, Golub,
        LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979). The order depends on the shape, the
        strides and the device alone. Of no elements all are NaN.
    """
    wide = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    dims = list(range(begin, end))
    values = x.to(wide)
    mean = values.mean(dims, keepdim=True)
    squares = (values - mean).square().sum(dims)
    count = math.prod(x.shape[begin:end])
    variance = squares / max(count - correction, 0.0) if count else squares * math.nan
    results = variance, mean.view(squares.shape), torch.rsqrt(variance + epsilon)
    return tuple(t.to(dtype).contiguous() for t in results)  # type: ignore[return-value]


def _fake(x: torch.Tensor, begin: int, end: int, correction: float, epsilon: float, dtype: torch.dtype) -> _Three:
    torch._check(0 <= begin < end <= x.dim(), lambda: f"column_moments: there are no dims {begin} to {end - 1} of {x.dim()}")
    supported = x.dtype in DTYPES and dtype in DTYPES
    torch._check(supported, lambda: f"column_moments: the moments of {x.dtype} in {dtype} are not supported")
    sizes = [*x.shape[:begin], *x.shape[end:]]
    return tuple(torch.empty(sizes, dtype=dtype, device=x.device) for _ in range(3))  # type: ignore[return-value]


# Implemented by csrc/column_moments. Any layout is read: Inductor runs convolutions, whose results these are, in another than the graph's.
column_moments = ops.define(
    "column_moments(Tensor x, int begin, int end, float correction, float epsilon, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
)
