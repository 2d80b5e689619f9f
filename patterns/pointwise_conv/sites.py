"""Reads a 1x1 convolution, or its gradients, out of a graph."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting import convolution_layout
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

#: Whose sums cuDNN and cuBLAS both make in fp32. In fp32 itself each has a precision of its own, which the user sets.
DTYPES = frozenset({torch.float16, torch.bfloat16})


@dataclasses.dataclass(frozen=True)
class Convolution:
    """What a ``convolution``, or a ``convolution_backward``, multiplies.

    Attributes:
        node: the convolution, or its gradients.
        x: (batch, channels, pixels ...).
        weight: (outputs, channels, 1 ...).
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node

    @property
    def channels(self) -> int:
        return g.value(self.weight).shape[1]

    @property
    def outputs(self) -> int:
        return g.value(self.weight).shape[0]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of a 1x1 convolution.

    Attributes:
        conv: the convolution.
        grad: that of its result.
        of_x, of_weight: the nodes of the results; None where one is not used.
        are_rows: whether x and the gradient lie channels last: as matrices of a row a pixel. Otherwise the gradient lies as planes.
    """

    conv: Convolution
    grad: fx.Node
    of_x: fx.Node | None
    of_weight: fx.Node | None
    are_rows: bool

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in (self.of_x, self.of_weight) if n is not None)


def read_convolution(node: fx.Node) -> Convolution | Reject | None:
    """The 1x1 convolution of a ``convolution`` or ``convolution_backward`` on a GPU."""
    args = g.arguments(node)
    x, weight = args["input"], args["weight"]
    sizes = g.value(weight).shape
    if (
        g.value(x).device.type != "cuda"
        or args["transposed"]
        or not g.same_size(args["groups"], 1)
        or not 2 < len(sizes) == g.value(x).dim()
    ):
        return None
    plain = (("stride", 1), ("padding", 0))
    if any(not g.same_size(n, 1) for n in sizes[2:]) or any(not g.same_size(n, usual) for name, usual in plain for n in args[name]):
        return None
    dtype = g.value(x).dtype
    if dtype not in DTYPES:
        return Reject(
            f"dtype {dtype}: bfloat16 and float16 are accepted; convolutions and products in others have precisions of their own", node
        )
    if dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return Reject("products in float16 are set to be added in float16, which convolutions are not", node)
    tensors = [x, weight, *([args["grad_output"]] if "grad_output" in args else [])]
    if any(g.value(t).dtype != dtype for t in tensors):
        return Reject("operands of several dtypes", node)
    if not all(isinstance(n, int) for t in tensors for n in (*g.value(t).shape, *g.value(t).stride())):
        return Reject("symbolic sizes: which library call is faster is timed for sizes that are known", node)
    if 0 in g.value(x).shape or 0 in sizes:
        return None
    return Convolution(node, x, weight)


def read_gradients(node: fx.Node) -> Gradients | Reject | None:
    """The gradients at ``node``, a ``convolution_backward``."""
    conv = read_convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    args = g.arguments(node)
    if args["output_mask"][2]:
        return Reject("the bias's gradient is computed with the others", node)
    results: dict[Any, fx.Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in results:
            return Reject(f"{g.describe(user)} uses the gradients in a way that is not supported", user)
        results[user.args[1]] = user
    grad = args["grad_output"]
    found = Gradients(conv, grad, results.get(0), results.get(1), is_rows(g.value(grad)) and is_rows(g.value(conv.x)))
    if not found.outputs:
        return None
    if not found.are_rows and not g.value(grad).is_contiguous():
        return Reject("its tensors lie neither channels last nor as planes, without gaps", node)
    lies = {found.of_x: is_rows if found.are_rows else torch.Tensor.is_contiguous, found.of_weight: is_rows}
    if not all(lies[n](g.value(n)) for n in found.outputs):
        return Reject("the gradients lie otherwise than what they are computed of", node)
    if not found.are_rows and found.of_x is None:
        return Reject("the weight's gradient of planes is a sum of products, for which a library copies them, as cuDNN does", node)
    return found


def is_rows(tensor: torch.Tensor) -> bool:
    """Whether a (batch, channels, pixels ...) tensor is a matrix of a row a pixel, without gaps."""
    step = 1
    for d in (1, *reversed(range(2, tensor.dim())), 0):
        if tensor.shape[d] != 1 and tensor.stride(d) != step:
            return False
        step *= tensor.shape[d]
    return True


def why_not_planes(conv: Convolution) -> str:
    """Why the images of a convolution are not multiplied one by one as they lie; empty if they are."""
    tensor = g.value(conv.x)
    is_matrices = tensor.is_contiguous() or (tensor.dim() == 3 and is_rows(tensor))
    if not is_matrices or not g.value(conv.node).is_contiguous():
        return "its tensors do not lie as planes, without gaps"
    if tensor.dim() == 4 and convolution_layout.is_channels_last_optimised(conv.node.graph) is not False:
        return "Inductor will run the graph's convolutions channels last, where a library multiplies already"
    return ""
