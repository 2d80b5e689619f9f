"""Reads a depthwise convolution, or its backward, out of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.depthwise_conv.ops import DTYPES
from fusebackend.rewriting.convolution_gradients import read_gradients
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Convolution:
    """What a ``convolution``, or a ``convolution_backward``, convolves.

    Attributes:
        node: the convolution, or its backward.
        x, weight: its operands; of rank 3 for a conv1d.
        stride, padding, dilation: as the operator takes them; a conv1d has one row.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]

    @property
    def is_1d(self) -> bool:
        return g.value(self.x).dim() == 3

    @property
    def dtype(self) -> torch.dtype:
        return g.value(self.x).dtype

    @property
    def device(self) -> torch.device:
        return g.value(self.x).device


@dataclasses.dataclass(frozen=True)
class Backward:
    """A convolution's backward.

    Attributes:
        conv: the convolution.
        grad: the incoming gradient.
        results: the nodes of the gradients of x, weight and bias; None where it is not used.
    """

    conv: Convolution
    grad: fx.Node
    results: tuple[fx.Node | None, ...]


def read_convolution(node: fx.Node) -> Convolution | Reject | None:
    """The depthwise convolution that ``node``, a ``convolution`` or ``convolution_backward``, stands for."""
    args = g.arguments(node)
    x, weight = args["input"], args["weight"]
    rank = g.value(x).dim()
    groups, channels = args["groups"], g.value(x).shape[1] if rank > 1 else 0
    groups = g.value(groups) if isinstance(groups, fx.Node) else groups
    if rank not in (3, 4) or g.same_size(groups, 1) or args["transposed"]:
        return None
    if not g.same_size(groups, channels):
        per_group = g.value(weight).shape[1]
        return Reject(f"{per_group} input channels a group; depthwise convolutions, of one, are supported", node)
    numbers = [args[name] for name in ("stride", "padding", "dilation")]
    if not all(isinstance(n, int) for values in numbers for n in values):
        return Reject("a stride, padding or dilation that is computed in the graph", node)
    numbers = [[*v] * (rank - 2) if len(v) == 1 else [*v] for v in numbers]  # one number stands for all dims
    stride, padding, dilation = ([1, *v] if rank == 3 else v for v in numbers)
    if rank == 3:
        padding[0] = 0
        if stride[1] == 1 and dilation[1] == 1 and g.same_size(g.value(weight).shape[0], channels):
            return None  # causal_conv1d's
    tensor = g.value(x)
    if tensor.dtype not in DTYPES and not (tensor.dtype == torch.float64 and tensor.device.type == "cpu"):
        return Reject(f"dtype {tensor.dtype} on {tensor.device.type}: float32, float16 and bfloat16 are supported", node)
    if g.value(weight).dtype != tensor.dtype:
        return Reject(f"x is {tensor.dtype} and weight {g.value(weight).dtype}: one dtype is supported", node)
    (top, left), pair = padding, _pair
    return Convolution(node, x, weight, pair(stride), (top, top, left, left), pair(dilation))


def read_backward(node: fx.Node) -> Backward | Reject | None:
    """The backward at ``node``, with the sum of the incoming gradient that is the bias's: on GPUs Inductor takes it out."""
    conv = read_convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    grad, results = g.arguments(node)["grad_output"], read_gradients(node)
    if isinstance(results, Reject):
        return results
    if results[2] is None and results[1] is not None:
        results[2] = _bias_gradient(grad)
    return Backward(conv, grad, tuple(results))


def _bias_gradient(grad: fx.Node) -> fx.Node | None:
    """The sum of ``grad`` over all dims but the channels."""
    tensor = g.value(grad)
    dims = [d for d in range(tensor.dim()) if d != 1]
    for user in grad.users:
        if user.target is aten.sum.dim_IntList and g.value(user).dtype == tensor.dtype and not g.arguments(user)["keepdim"]:
            if sorted(d % tensor.dim() for d in user.args[1]) == dims:
                return user
    return None


def _pair(values: Sequence[Any]) -> tuple[int, int]:
    first, second = values
    return first, second
