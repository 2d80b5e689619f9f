"""What the kernels make a GPU, or this CPU, do for a convolution: asks C++ (csrc/depthwise_conv/work.h and cpu_launch.h), where there is no
GPU as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusebackend.native import ops


def kernel_work(
    direction: str,
    sizes: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    orders: Sequence[bool],
    dtype: torch.dtype,
    multiprocessors: int,
) -> Mapping[str, float]:
    """The facts that csrc/depthwise_conv/work.h names, or cpu_launch.h.

    Args:
        direction: ``"forward"``, or whose gradient, ``"input"`` or ``"weight"``; ``"gradients"``: what computes both on a GPU, all zero if
            no kernel does.
        sizes: batch, channels, outputs, rows and columns of x, rows and columns of the result.
        padding: above and on the left.
        orders: of x, of the result (or the incoming gradient), and of x's gradient: True for (batch, height, width, channels).
        multiprocessors: how many the GPU has; 0 for this CPU.
    """
    lists = (list(part) for part in (sizes, taps, stride, padding, dilation, orders))
    return _facts(direction, *lists, dtype, multiprocessors)


# Implemented by csrc/depthwise_conv/bind_work.cpp.
_facts = ops.define_facts(
    "depthwise_conv_work(str direction, int[] sizes, int[] taps, int[] stride, int[] padding, int[] dilation, bool[] orders,"
    " ScalarType dtype, int multiprocessors) -> str"
)
