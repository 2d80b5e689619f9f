"""Reads a convolution's backward out of a joint graph.

Included are the crop of x's gradient, the zeros that a slice's gradient puts behind the incoming one, and SiLU's gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.activation import read_silu_gradient
from fusebackend.patterns.causal_conv1d.nodes import is_number, size_of, unconverted
from fusebackend.patterns.causal_conv1d.read_convolution import Convolution, read_convolution
from fusebackend.patterns.causal_conv1d.read_forward import Forward, read_forward_of
from fusebackend.rewriting.convolution_gradients import read_gradients
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Backward:
    """A convolution's backward.

    Attributes:
        conv: the convolution.
        bias: its bias, if SiLU's gradient needs it.
        grad: the incoming gradient, of what a slice kept and SiLU made.
        transposed: whether ``grad`` is (batch, time, channels).
        left: the convolution's padding before; what comes after follows from the length of ``grad``.
        shift: the constant that was added before SiLU.
        silu: whether SiLU's gradient is included.
        results: the nodes of the gradients of x (cropped), weight and bias; None where it is not used.
        nodes: all nodes that compute the gradients.
    """

    conv: Convolution
    bias: fx.Node | None
    grad: fx.Node
    transposed: bool
    left: Any
    shift: float
    silu: bool
    results: tuple[fx.Node | None, ...]
    nodes: tuple[fx.Node, ...]


def read_backward(node: fx.Node) -> Backward | Reject | None:
    """The backward at ``node``, a ``convolution_backward``."""
    conv = read_convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    args = g.arguments(node)
    results = read_gradients(node)
    if isinstance(results, Reject):
        return results
    nodes: list[fx.Node] = [node, *node.users]
    if results[2] is None:
        results[2] = _bias_gradient(args["grad_output"])
        nodes += [results[2]] if results[2] else []
    if results[0] is not None and conv.x is not args["input"]:
        padded, pad = results[0], unconverted(args["input"])
        if pad is not args["input"]:
            padded = g.only_user(padded, prims.convert_element_type.default) or padded
        crop = g.only_user(padded, aten.constant_pad_nd.default)
        if crop is not None and _crops(crop, pad):
            nodes += [padded, crop] if padded is not results[0] else [crop]
            results[0] = crop
        elif pad is args["input"]:
            return Reject("the gradient of the padded input is not cropped by the padding", padded)
        else:
            conv = Convolution(args["input"], args["weight"], args["padding"][0], args["padding"][0])

    grad, left, transposed = args["grad_output"], conv.left, False
    unsliced = _read_slice_gradient(grad)
    if unsliced is not None:
        grad, transposed, outer = unsliced
        nodes += outer
    of_silu = read_silu_gradient(grad)
    if of_silu is not None:
        dy, pre, inner = of_silu
        found = read_forward_of(pre)
        same = found is not None and found.conv == conv and found.pre is pre and found.transposed == transposed
        time = 1 if transposed else 2
        if same and found.left == left and g.same_size(g.value(pre).shape[time], g.value(grad).shape[time]):
            return Backward(conv, found.bias, dy, transposed, left, found.shift, True, tuple(results), (*nodes, *inner))
    return Backward(conv, None, grad, transposed, left, 0.0, False, tuple(results), tuple(nodes))


def backwards_of(forward: Forward) -> list[Backward | Reject | None]:
    """The backwards, in the joint graph, of the same convolution: of the same weight and padded input."""
    users = {u for u in forward.conv.weight.users if u.target is aten.convolution_backward.default}
    return [read_backward(u) for u in sorted(users) if u.args[1] is forward.anchor.args[0]]


def _bias_gradient(grad: fx.Node) -> fx.Node | None:
    """The sum of ``grad`` over batch and time: on GPUs Inductor takes the bias's gradient out of the convolution's backward."""
    for user in grad.users:
        if user.target is aten.sum.dim_IntList and sorted(user.args[1]) == [0, 2] and g.value(user).dtype == g.value(grad).dtype:
            if not g.arguments(user)["keepdim"]:
                return user
    return None


def _crops(crop: fx.Node, padded: fx.Node) -> bool:
    """Whether ``crop``, a constant_pad_nd, takes away what ``padded``, another, had added."""
    forward, backward = list(padded.args[1]), list(crop.args[1])
    width = max(len(forward), len(backward))
    forward += [0] * (width - len(forward))
    backward += [0] * (width - len(backward))
    return all(g.same_size(size_of(a), -size_of(b)) for a, b in zip(forward, backward))


def _read_slice_gradient(grad: fx.Node) -> tuple[fx.Node, bool, list[fx.Node]] | None:
    """If ``grad`` is the gradient of a slice along time, which puts zeros behind what came in: (what came in, whether that is
    (batch, time, channels), the nodes)."""
    transposed = grad.target is aten.permute.default and list(grad.args[1]) == [0, 2, 1]
    padded = grad.args[0] if transposed else grad
    time, nodes = 1 if transposed else 2, [grad, padded] if transposed else [grad]
    if padded.target is aten.slice_scatter.default:
        args = g.arguments(padded)
        zeros = args["self"]
        if args["dim"] not in (time, time - 3) or args["start"] not in (0, None) or args["step"] != 1:
            return None
        if zeros.target is aten.full.default and is_number(zeros.args[1], 0):
            return args["src"], transposed, [*nodes, zeros]
    if padded.target is aten.constant_pad_nd.default:
        args = g.arguments(padded)
        pad = [*args["pad"], 0, 0][:4]
        end = pad.pop(3 if transposed else 1)
        if all(is_number(p, 0) for p in pad) and isinstance(end, int) and end >= 0 and args["value"] in (0, 0.0):
            return args["self"], transposed, nodes
    return None
