"""Reads depthwise convolutions out of a joint graph: padding before, slice, constant and SiLU after, and their backward."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten
prims = torch.ops.prims

DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A depthwise convolution found in a graph: over ``x``, padded by ``left`` and ``right`` (ints or nodes)."""

    x: fx.Node
    weight: fx.Node
    left: Any
    right: Any

    @property
    def taps(self) -> Any:
        return g.value(self.weight).shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """What is convolved; autocast converts ``x`` to it after the pad, and the gradient back before the crop."""
        return g.value(self.weight).dtype


def convolution(node: fx.Node) -> Convolution | Reject | None:
    """The depthwise convolution that a ``convolution`` or its backward stands for, the input's padding included."""
    args = g.arguments(node)
    source, weight = args["input"], args["weight"]
    if len(args["stride"]) != 1 or g.value(source).dim() != 3:
        return None
    channels, groups = g.value(source).shape[1], size_of(args["groups"])
    if g.same_size(groups, 1) and not (g.same_size(channels, 1) and g.same_size(g.value(weight).shape[0], 1)):
        return None  # every output sees every channel: another operation altogether
    tensor = g.value(source)
    if not g.same_size(groups, channels):
        return Reject(f"groups = {groups}, not the number of channels ({channels}): only depthwise convolutions", node)
    if not g.same_size(g.value(weight).shape[0], channels):
        outputs = g.value(weight).shape[0]
        return Reject(f"{outputs} outputs for {channels} channels: one output a channel is accepted", node)
    if args["transposed"]:
        return Reject("a transposed convolution", node)
    if list(args["stride"]) != [1]:
        return Reject(f"stride {args['stride'][0]}: only 1 is accepted", node)
    if list(args["dilation"]) != [1]:
        return Reject(f"dilation {args['dilation'][0]}: only 1 is accepted", node)
    if tensor.dtype not in DTYPES and not (tensor.dtype == torch.float64 and tensor.device.type == "cpu"):
        return Reject(f"dtype {tensor.dtype} on {tensor.device.type}: float32, float16 and bfloat16 are accepted", node)
    padding = args["padding"][0]
    unconverted = _unconverted(source)
    padded = _unpad(unconverted)
    if padded is None or (isinstance(padded, Reject) and unconverted is not source):
        return Convolution(source, weight, padding, padding)
    if isinstance(padded, Reject):
        return padded
    x, left, right = padded
    if padding != 0:
        if isinstance(left, fx.Node) or isinstance(right, fx.Node):
            return Reject("a symbolic pad before a convolution with padding of its own", node)
        left, right = left + padding, right + padding
    return Convolution(x, weight, left, right)


def _unconverted(node: fx.Node) -> fx.Node:
    """Sees through one conversion of the type."""
    return node.args[0] if node.target is prims.convert_element_type.default else node


def _unpad(node: fx.Node) -> tuple[fx.Node, Any, Any] | Reject | None:
    """Sees through a zero pad along time: (what is padded, left, right); None if there is no pad."""
    if node.target is not aten.constant_pad_nd.default:
        return None
    args = g.arguments(node)
    pad = list(args["pad"])
    if args["value"] not in (0, 0.0, False, None):
        return Reject(f"the input is padded with {args['value']}: only zeros are a convolution's padding", node)
    if any(not isinstance(p, int) or p != 0 for p in pad[2:]):
        return Reject(f"the input is padded by {pad}: only along time (its last dim)", node)
    left, right = (size_of(p) for p in pad[:2])
    if any(g.hint(p) is None or g.hint(p) < 0 for p in (left, right)):
        return Reject(f"the input is cropped by {pad}: only padding is accepted", node)
    if not all(isinstance(s, int) for s in (left, right)) and not _surely_pads(node):
        return Reject("a pad of a symbolic size that may become a crop", node)
    return args["self"], pad[0], pad[1]


def size_of(size: Any) -> Any:
    """A size, which may be a node's value."""
    return g.value(size) if isinstance(size, fx.Node) else size


def _surely_pads(node: fx.Node) -> bool:
    return all(statically_known_true(size_of(p) >= 0) for p in node.args[1][:2])


def _single(node: fx.Node, target: Any) -> fx.Node | None:
    """The only user of ``node``, if it is a call of ``target``."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.op == "call_function" and user.target is target else None


def _is_scalar(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _operands(node: fx.Node, target: Any) -> tuple[Any, Any] | None:
    """Both operands of a binary pointwise call; None for another call, or one with an ``alpha``."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not target:
        return None
    if node.kwargs or len(node.args) != 2:
        return None
    return node.args[0], node.args[1]


def _either_order(operands: tuple[Any, Any] | None):
    if operands is not None:
        yield operands
        yield operands[1], operands[0]


def _uncast(node: Any) -> Any:
    """Sees through a conversion to fp32, which pointwise decompositions make of 16-bit types."""
    if isinstance(node, fx.Node) and node.target is prims.convert_element_type.default:
        return node.args[0] if node.args[1] == torch.float32 else node
    return node


# ---- forward ----


@dataclasses.dataclass(frozen=True)
class Forward:
    """A convolution with what follows it: ``nodes`` from the convolution to ``pre``."""

    conv: Convolution
    bias: fx.Node | None
    left: Any
    right: Any
    shift: float
    turned: bool  # pre is (batch, time, channels)
    pre: fx.Node  # the value before SiLU
    nodes: tuple[fx.Node, ...]


def forward(node: fx.Node) -> Forward | Reject | None:
    """The convolution at ``node`` with the slice along time and the constant that follow it."""
    conv = convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    left, right, shift, turned, last, nodes = conv.left, conv.right, 0.0, False, node, [node]
    turn = _single(node, aten.permute.default)
    turn = turn if turn is not None and list(turn.args[1]) == [0, 2, 1] else None
    cut = _single(turn or node, aten.slice.Tensor)
    kept = None if cut is None else _kept(cut, conv, time=1 if turn else 2)
    if kept is not None:
        (left, right), turned, last = kept, turn is not None, cut
        nodes += [turn, cut] if turn else [cut]
    added = _single(last, aten.add.Tensor)
    if added is not None and not added.kwargs:
        constant = next((b for a, b in _either_order(added.args) if a is last and isinstance(b, (int, float))), None)
        if constant is not None and not isinstance(constant, bool) and math.isfinite(constant):
            shift, last = float(constant), added
            nodes.append(added)
    return Forward(conv, g.arguments(node)["bias"], left, right, shift, turned, last, tuple(nodes))


def _kept(cut: fx.Node, conv: Convolution, time: int) -> tuple[Any, Any] | None:
    """The padding (left, right) of which only ``cut``, a slice along time, is left; None if it can't be said."""
    args = g.arguments(cut)
    start = args["start"] or 0
    if args["dim"] not in (time, time - 3) or args["step"] != 1 or not isinstance(start, int):
        return None
    length, whole = g.value(cut).shape[time], g.value(conv.x).shape[2]
    if isinstance(conv.left, fx.Node) or isinstance(conv.right, fx.Node):
        return None
    if start < 0:
        start = g.value(cut.args[0]).shape[time] + start
        if not isinstance(start, int) or start < 0:
            return None
    left = conv.left - start
    # whole + left + right - taps + 1 = length
    right = length - whole - left + conv.taps - 1
    if g.same_size(right, conv.right):
        right = conv.right
    if isinstance(right, torch.SymInt):
        right = next((r for r in (0, conv.right) if g.same_size(right, r)), None)
    return None if right is None else (left, right)


def silu(pre: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """(silu(pre), all nodes of it) as ATen's decomposition writes it, or undecomposed."""
    for user in pre.users:
        if user.target is aten.silu.default:
            return user, (user,)
    wide = [pre, *(u for u in pre.users if _uncast(u) is pre and u is not pre)]
    for value in wide:
        for division in value.users:
            operands = _operands(division, aten.div.Tensor)
            if operands is None or operands[0] is not value or not isinstance(operands[1], fx.Node):
                continue
            exp = _one_plus_exp(operands[1], value)
            if exp is None:
                continue
            nodes = [*exp, operands[1], division]
            last = division
            if value is not pre:
                nodes.insert(0, value)
                last = _single(division, prims.convert_element_type.default)
                if last is None or last.args[1] != g.value(pre).dtype:
                    continue
                nodes.append(last)
            return last, tuple(nodes)
    return None


# ---- backward ----


@dataclasses.dataclass(frozen=True)
class Backward:
    """A convolution's backward: what it is of, and which of its results are used."""

    conv: Convolution
    bias: fx.Node | None
    grad: fx.Node
    turned: bool  # grad is (batch, time, channels)
    left: Any
    shift: float
    silu: bool
    results: tuple[fx.Node | None, ...]  # the nodes of dx (uncropped), dw, db
    nodes: tuple[fx.Node, ...]


def backwards_of(found: Forward) -> list[Backward | Reject | None]:
    """The backwards of the same convolution (same weight and padded input) in the joint graph."""
    weight = found.conv.weight
    users = {u for u in weight.users if u.target is aten.convolution_backward.default}
    return [backward(u) for u in sorted(users) if u.args[1] is found.nodes[0].args[0]]


def backward(node: fx.Node) -> Backward | Reject | None:
    """The backward at ``node`` with the crop of x's gradient, the padding of the incoming one, and SiLU's slope."""
    conv = convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    args = g.arguments(node)
    nodes: list[fx.Node] = [node]
    results: list[fx.Node | None] = [None, None, None]
    for user in node.users:
        if user.target is not operator.getitem or results[user.args[1]] is not None:
            return Reject(f"{g.describe(user)} uses the gradients in a way that is not known", user)
        results[user.args[1]] = user
        nodes.append(user)
    if results[2] is None:
        results[2] = _bias_gradient(args["grad_output"])
        nodes += [results[2]] if results[2] else []
    if results[0] is not None and conv.x is not args["input"]:
        padded, pad = results[0], _unconverted(args["input"])
        if pad is not args["input"]:
            padded = _single(padded, prims.convert_element_type.default) or padded
        crop = _single(padded, aten.constant_pad_nd.default)
        if crop is not None and _crops(crop, pad):
            nodes += [padded, crop] if padded is not results[0] else [crop]
            results[0] = crop
        elif pad is args["input"]:
            return Reject("the gradient of the padded input is not cropped by the padding", padded)
        else:
            conv = Convolution(args["input"], args["weight"], args["padding"][0], args["padding"][0])

    grad, left = args["grad_output"], conv.left
    turned = False
    scattered = _unscatter(grad)
    if scattered is not None:
        grad, turned, outer = scattered
        nodes += outer
    slope = _silu_slope(grad)
    if slope is not None:
        dy, pre, inner = slope
        found = _forward_of(pre)
        same = found is not None and found.conv == conv and found.pre is pre and found.turned == turned
        time = 1 if turned else 2
        if same and found.left == left and g.same_size(g.value(pre).shape[time], g.value(grad).shape[time]):
            return Backward(conv, found.bias, dy, turned, left, found.shift, True, tuple(results), (*nodes, *inner))
    return Backward(conv, None, grad, turned, left, 0.0, False, tuple(results), tuple(nodes))


def _bias_gradient(grad: fx.Node) -> fx.Node | None:
    """The sum of ``grad`` over batch and time: on GPUs Inductor takes the bias's gradient out of the convolution's backward."""
    for user in grad.users:
        if user.target is aten.sum.dim_IntList and sorted(user.args[1]) == [0, 2] and g.value(user).dtype == g.value(grad).dtype:
            if not g.arguments(user)["keepdim"]:
                return user
    return None


def _forward_of(pre: fx.Node) -> Forward | None:
    node = pre
    for _ in range(4):
        if node.target is aten.convolution.default:
            found = forward(node)
            return found if isinstance(found, Forward) else None
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return None


def _crops(crop: fx.Node, padded: fx.Node) -> bool:
    """Whether ``crop`` takes away what ``padded`` (a constant_pad_nd) had added."""
    forward, backward = list(padded.args[1]), list(crop.args[1])
    width = max(len(forward), len(backward))
    forward += [0] * (width - len(forward))
    backward += [0] * (width - len(backward))
    return all(g.same_size(size_of(a), -size_of(b)) for a, b in zip(forward, backward))


def _unscatter(grad: fx.Node) -> tuple[fx.Node, bool, list[fx.Node]] | None:
    """The gradient that a slice's backward puts before zeros along time, whether it is (batch, time, channels), and the
    nodes of that."""
    turned = grad.target is aten.permute.default and list(grad.args[1]) == [0, 2, 1]
    padded = grad.args[0] if turned else grad
    time, nodes = 1 if turned else 2, [grad, padded] if turned else [grad]
    if padded.target is aten.slice_scatter.default:
        args = g.arguments(padded)
        zeros = args["self"]
        if args["dim"] not in (time, time - 3) or args["start"] not in (0, None) or args["step"] != 1:
            return None
        if zeros.target is aten.full.default and _is_scalar(zeros.args[1], 0):
            return args["src"], turned, [*nodes, zeros]
    if padded.target is aten.constant_pad_nd.default:
        args = g.arguments(padded)
        pad = [*args["pad"], 0, 0][:4]
        end = pad.pop(3 if turned else 1)
        if all(_is_scalar(p, 0) for p in pad) and isinstance(end, int) and end >= 0 and args["value"] in (0, 0.0):
            return args["self"], turned, nodes
    return None


def _sigmoid(node: Any, value: Any) -> tuple[fx.Node, ...] | None:
    """The nodes of ``sigmoid(value)`` if ``node`` is it: one operator, or 1 / (1 + exp(-value)) as in torch 2.11."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.sigmoid.default:
        return (node,) if node.args[0] is value else None
    nodes = [node]
    scaled = next((a for a, b in _either_order(_operands(node, aten.mul.Tensor)) if _is_scalar(b, 1)), None)
    inverse = node if scaled is None else scaled
    if not isinstance(inverse, fx.Node) or inverse.target is not aten.reciprocal.default:
        return None
    one_plus = inverse.args[0]
    exp = _one_plus_exp(one_plus, value)
    return None if exp is None else tuple({*nodes, inverse, one_plus, *exp})


def _one_plus_exp(node: Any, value: Any) -> tuple[fx.Node, fx.Node] | None:
    """(neg, exp) if ``node`` is exp(-value) + 1."""
    exp = next((a for a, b in _either_order(_operands(node, aten.add.Tensor)) if _is_scalar(b, 1)), None)
    if not isinstance(exp, fx.Node) or exp.target is not aten.exp.default:
        return None
    neg = exp.args[0]
    return (neg, exp) if neg.target is aten.neg.default and neg.args[0] is value else None


def _silu_slope(grad: fx.Node) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """(dy, pre, nodes) if ``grad`` is dy * s * (1 + pre * (1 - s)), s = sigmoid(pre), as ATen decomposes it."""
    product = grad.args[0] if grad.target is prims.convert_element_type.default else grad
    for first, second in _either_order(_operands(product, aten.mul.Tensor)):
        inner = next((a for a, b in _either_order(_operands(second, aten.add.Tensor)) if _is_scalar(b, 1)), None)
        for value, complement in _either_order(_operands(inner, aten.mul.Tensor)):
            difference = _operands(complement, aten.sub.Tensor)
            if difference is None or not _is_scalar(difference[0], 1):
                continue
            sigmoid = difference[1]
            of_sigmoid = _sigmoid(sigmoid, value)
            if of_sigmoid is None:
                continue
            for dy, s in _either_order(_operands(first, aten.mul.Tensor)):
                if s is not sigmoid or not isinstance(dy, fx.Node):
                    continue
                pre, plain_dy = _uncast(value), _uncast(dy)
                if g.value(plain_dy).dtype != g.value(grad).dtype or g.value(pre).dtype != g.value(grad).dtype:
                    continue
                nodes = {grad, product, first, second, inner, complement, *of_sigmoid, value, dy} - {pre, plain_dy}
                return plain_dy, pre, tuple(sorted(nodes))
    return None
