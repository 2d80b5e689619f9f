"""The family's operators: schemas, fakes, a reference in PyTorch, and queries of what the kernels support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops
from fusebackend.patterns.causal_conv1d.channel_reference import check_epilogue, finished


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    mean: torch.Tensor | None = None,
    variance: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> torch.Tensor:
    """What ``fusebackend::depthwise_conv`` computes.

    Args:
        x: (batch, channels, height, width).
        weight: (channels * multiplier, 1, taps, taps).
        bias: (channels * multiplier,) or None.
        stride, dilation: along height and width.
        padding: rows of zeros above and below, columns of zeros on the left and on the right; x is cropped by negative numbers.
        mean, variance, scale, shift: (channels * multiplier,) or None, of x's dtype or of that of the sums: batch norm in inference.
        eps: what is added to the variance.
        activation: a name of causal_conv1d's ``channel_reference.ACTIVATIONS``, or "".

    Returns:
        (batch, channels * multiplier, height, width), in x's dtype; sums are in fp32 for 16-bit floats.
    """
    top, bottom, left, right = padding
    y = F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, tuple(stride), 0, tuple(dilation), x.shape[1])
    return finished(y, mean, variance, scale, shift, eps, activation).to(x.dtype)


#: Those that the kernels take; float64 on CPUs only.
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a (batch, channels, height, width) tensor lies in memory as (batch, height, width, channels). Symbolic strides are judged by
    their hints."""
    sizes, strides = g.hints(tensor.shape), g.hints(tensor.stride())
    if sizes is None or strides is None:
        return False
    if sizes[2] > 1 or sizes[3] > 1:
        return strides[1] == 1
    return sizes[1] > 1 and strides[1] == 1 and strides[3] == sizes[1]


def _empty(like: torch.Tensor, sizes: Sequence[Any], channels_last: bool) -> torch.Tensor:
    if not channels_last:
        return like.new_empty(sizes)
    return torch.empty_permuted(sizes, (0, 2, 3, 1), dtype=like.dtype, device=like.device)


def _limits() -> tuple[int, int, int, int]:
    """``depthwise_conv_limits()``: the most taps of a plane, the largest stride or dilation, rows or columns, and planes. Without a
    library, whose operators nothing calls then, any numbers will do."""
    return ops.ask("depthwise_conv_limits", default=(1 << 62,) * 4)


def _result_sizes(
    operator: str, x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[Any], dilation: Sequence[int]
) -> tuple[Any, Any, Any, Any]:
    """Refuses what csrc/depthwise_conv/bind.h refuses, and returns the sizes of the result."""

    def check(holds: bool, message: str) -> None:
        torch._check(holds, lambda: f"{operator}: {message}")

    check(x.dim() == 4 and weight.dim() == 4, "x must be (batch, channels, height, width) and weight (outputs, 1, taps, taps)")
    check(x.dtype in DTYPES or (x.dtype == torch.float64 and x.device.type == "cpu"), f"{x.dtype} on {x.device.type} is not supported")
    arguments.check_dtype(operator, x, weight=weight)
    arguments.check_device(operator, x, weight=weight)
    check(len(stride) == 2 and len(dilation) == 2 and len(padding) == 4, "two strides and dilations, and four paddings, are needed")
    channels, outputs = g.hint(x.shape[1]), g.hint(weight.shape[0])
    fits = arguments.are_same(weight.shape[1], 1) and (
        channels is None or outputs is None or (channels > 0 < outputs and not outputs % channels)
    )
    check(fits, f"weight must be (a multiple of {x.shape[1]}, 1, taps, taps), got {tuple(weight.shape)}")
    most_taps, most_step, most_side, most_planes = _limits()
    taps = g.hints(weight.shape[2:])
    check(taps is None or (min(taps) >= 1 and taps[0] * taps[1] <= most_taps), f"from 1 to {most_taps} taps are supported")
    check(all(1 <= s <= most_step for s in (*stride, *dilation)), f"strides and dilations must be from 1 to {most_step}")
    sizes: list[Any] = []
    for d in range(2):
        before, after = padding[2 * d], padding[2 * d + 1]
        room = x.shape[2 + d] + before + after - dilation[d] * (weight.shape[2 + d] - 1) - 1
        check((g.hint(room) or 0) >= 0, "more taps than padded rows or columns")
        sides = (g.hint(s) or 0 for s in (x.shape[2 + d], before, after))
        check(all(-most_side <= s <= most_side for s in sides), f"more than {most_side} rows, columns or padding are not supported")
        sizes.append(room // stride[d] + 1)
    planes = (g.hint(x.shape[0]) or 0) * (outputs or 0)
    check(planes <= most_planes, f"more than {most_planes} planes are not supported")
    return x.shape[0], weight.shape[0], sizes[0], sizes[1]


def _fake(
    x, weight, bias, stride, padding, dilation, channels_last, mean=None, variance=None, scale=None, shift=None, eps=0.0, activation=""
):
    sizes = _result_sizes("depthwise_conv", x, weight, stride, padding, dilation)
    if bias is not None:
        fits = arguments.same_sizes(bias.shape, weight.shape[:1])
        torch._check(fits, lambda: f"depthwise_conv: bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")
        arguments.check_dtype("depthwise_conv", x, bias=bias)
        arguments.check_device("depthwise_conv", x, bias=bias)
    check_epilogue("depthwise_conv", x, weight.shape[0], activation, mean=mean, variance=variance, scale=scale, shift=shift)
    return _empty(x, sizes, is_channels_last(x) if channels_last is None else channels_last)


def _fake_backward(grad, x, weight, stride, padding, dilation, channels_last, weight_channels_last, need_x, need_weight, need_bias):
    sizes = _result_sizes("depthwise_conv_backward", x, weight, stride, padding, dilation)
    fits = arguments.same_sizes(grad.shape, sizes)
    torch._check(fits, lambda: f"depthwise_conv_backward: grad must be {tuple(sizes)}, got {tuple(grad.shape)}")
    arguments.check_dtype("depthwise_conv_backward", x, grad=grad)
    arguments.check_device("depthwise_conv_backward", x, grad=grad)
    order = is_channels_last(x) if channels_last is None else channels_last
    return (
        _empty(x, x.shape, order) if need_x else x.new_empty((0,)),
        _empty(x, weight.shape, weight_channels_last) if need_weight else x.new_empty((0,)),
        x.new_empty((weight.shape[0] if need_bias else 0,)),
    )


depthwise_conv = ops.define(
    "depthwise_conv(Tensor x, Tensor weight, Tensor? bias, int[] stride, SymInt[] padding, int[] dilation, bool? channels_last,"
    ' Tensor? mean=None, Tensor? variance=None, Tensor? scale=None, Tensor? shift=None, float eps=0., str activation="") -> Tensor',
    fake=_fake,
)
# Where an operator takes any strides, Inductor stores what it computes for it as contiguous. A backward's graph has the order in which
# x was saved; a gradient in the other one would have to be transposed.
depthwise_conv_backward = ops.define(
    "depthwise_conv_backward(Tensor grad, Tensor x, Tensor weight, int[] stride, SymInt[] padding, int[] dilation, bool? channels_last,"
    " bool weight_channels_last, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    layout=torch.Tag.needs_fixed_stride_order,
)

# Implemented by csrc/depthwise_conv/bind.cpp. It does not appear in graphs.
ops.define("depthwise_conv_limits() -> (int taps, int step, int side, int planes)", fake=_limits)
