"""Reads the gradients of a 1x1 convolution out of a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.convolution_gradients import read_gradients
from fusebackend.rewriting.pattern import Reject

#: Whose sums cuDNN and cuBLAS both make in fp32. In fp32 itself each has a precision of its own, which the user sets.
DTYPES = frozenset({torch.float16, torch.bfloat16})


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of a 1x1 convolution, all of whose tensors lie channels last, without gaps.

    Attributes:
        grad: that of its result, (batch, outputs, pixels ...).
        x: (batch, channels, pixels ...).
        weight: (outputs, channels, 1 ...).
        of_x, of_weight: the nodes of the results; None where one is not used.
    """

    grad: fx.Node
    x: fx.Node
    weight: fx.Node
    of_x: fx.Node | None
    of_weight: fx.Node | None

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in (self.of_x, self.of_weight) if n is not None)


def read(node: fx.Node) -> Gradients | Reject | None:
    """The gradients at ``node``, a ``convolution_backward``; None of another convolution, and of one that is not on a GPU."""
    args = g.arguments(node)
    if g.value(args["input"]).device.type != "cuda" or not _is_pointwise(args):
        return None
    dtype = g.value(args["input"]).dtype
    if dtype not in DTYPES:
        accepted = "bfloat16 and float16 are accepted; convolutions and products in others have precisions of their own"
        return Reject(f"dtype {dtype}: {accepted}", node)
    if dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return Reject("products in float16 are set to be added in float16, which convolutions are not", node)
    tensors = [args[name] for name in ("grad_output", "input", "weight")]
    if any(g.value(t).dtype != dtype for t in tensors):
        return Reject("operands of several dtypes", node)
    if not all(isinstance(n, int) for t in tensors for n in (*g.value(t).shape, *g.value(t).stride())):
        return Reject("symbolic sizes: which library call is faster is timed for sizes that are known", node)
    if any(0 in g.value(t).shape for t in tensors):
        return None
    if args["output_mask"][2]:
        return Reject("the bias's gradient is computed with the others", node)
    results = read_gradients(node)
    if isinstance(results, Reject):
        return results
    found = Gradients(*tensors, *results[:2])
    if not all(_is_matrix(g.value(n)) for n in (*tensors, *found.outputs)):
        return Reject("its tensors do not lie channels last, without gaps: a pixel is no row of a matrix", node)
    return found if found.outputs else None


def _is_pointwise(args: dict[str, Any]) -> bool:
    """Whether a batched convolution multiplies each pixel's channels by one matrix."""
    sizes = g.value(args["weight"]).shape
    if args["transposed"] or not g.same_size(args["groups"], 1) or not 2 < len(sizes) == g.value(args["input"]).dim():
        return False
    usual = (*((n, 1) for n in (*sizes[2:], *args["stride"])), *((n, 0) for n in args["padding"]))
    return all(g.same_size(n, value) for n, value in usual)


def _is_matrix(tensor: torch.Tensor) -> bool:
    """Whether a (batch, channels, pixels ...) tensor is one of a row a pixel, without gaps."""
    step = 1
    for d in (1, *reversed(range(2, tensor.dim())), 0):
        if tensor.shape[d] != 1 and tensor.stride(d) != step:
            return False
        step *= tensor.shape[d]
    return True
