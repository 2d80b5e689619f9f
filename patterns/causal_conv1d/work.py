"""What the kernels make a GPU do for a convolution: asks C++ (csrc/causal_conv1d/work.h), where there is no GPU as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusebackend.native import ops


def kernel_work(
    sizes: Sequence[int],
    orders: Sequence[bool],
    dtype: torch.dtype,
    left: int,
    silu: bool,
    multiprocessors: int,
    needed: Sequence[bool] = (),
    epilogue: bool = False,
) -> Mapping[str, float]:
    """The facts that csrc/causal_conv1d/work.h names.

    Args:
        sizes: batch, channels, samples of x, samples of the result, taps.
        orders: of x, of the result, and for a backward of x's gradient: True for (batch, time, channels).
        left: the padding before.
        silu: whether SiLU, or its gradient, is computed.
        needed: which gradients a backward computes, of x, weight and bias; none for a forward.
        multiprocessors: how many the GPU has.
        epilogue: whether a forward computes more behind its sums than SiLU (csrc/common/channel_epilogue.h).
    """
    return _facts(list(sizes), list(orders), dtype, left, silu, list(needed), multiprocessors, epilogue)


# Implemented by csrc/causal_conv1d/bind_work.cpp.
_facts = ops.define_facts(
    "causal_conv1d_work(int[] sizes, bool[] orders, ScalarType dtype, int left, bool silu, bool[] needed, int multiprocessors,"
    " bool epilogue=False) -> str"
)
