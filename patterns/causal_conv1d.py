"""Depthwise conv1d along time: Mamba's short convolutions, padded ones of other models, RWKV's kernels as long as T.

PyTorch runs all of them on one naive kernel, and Inductor calls it: 10x off a copy for 4 taps, 40x and more off what
the hardware allows for long ones; and it pads, slices and applies SiLU in kernels of their own. Here
``fusebackend::causal_conv1d`` takes the unpadded input in either memory order and does padding, slice, bias, constant
and SiLU in one pass; its backward gives the three gradients from the same inputs, with SiLU's slope recomputed.

Matched before forward and backward are parted (joint level): were only the forward rewritten, the partitioner would
keep and recompute the pad for the backward. A SiLU is absorbed only if its backward is too, or there is none;
otherwise the convolution would have to run twice.

    constant_pad_nd(x, [K-1, 0]) -> convolution(groups=C)            ->  causal_conv1d(x, w, b, left=K-1, right=0)
    convolution(x, padding=K-1, groups=C) -> slice(2, 0, T) -> silu  ->  causal_conv1d(x, w, b, K-1, 0, silu=True)
    convolution_backward(g, constant_pad_nd(x), w)                   ->  causal_conv1d_backward(g, x, w, b, K-1)
        -> getitem(0) -> constant_pad_nd([-(K-1), 0])
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import graph as g
from .. import native, ops
from ..pattern import Emitter, Match, Pattern, Reject
from ..registry import register

aten = torch.ops.aten
prims = torch.ops.prims

DTYPES = {torch.float32, torch.float16, torch.bfloat16}

# The kernels that work in either memory order, without a copy, are those for few taps.
CHANNELS_LAST_TAPS = 4


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    left: int,
    right: int,
    shift: float = 0.0,
    silu: bool = False,
) -> torch.Tensor:
    """What ``fusebackend::causal_conv1d`` computes.

    Args:
        x: (batch, channels, time); zeros are added before (``left``) and after (``right``) along time.
        weight: (channels, 1, taps).
        bias: (channels,) or None.
        shift: a constant added to every output, before SiLU.

    Returns:
        (batch, channels, time + left + right - taps + 1), in x's dtype.
    """
    out = F.conv1d(F.pad(x, (left, right)), weight, bias, groups=x.shape[1]) + shift
    return F.silu(out) if silu else out


def _empty_rows(x: torch.Tensor, length: Any, channels_last: bool) -> torch.Tensor:
    if channels_last:
        return x.new_empty((x.shape[0], length, x.shape[1])).transpose(1, 2)
    return x.new_empty((x.shape[0], x.shape[1], length))


def _fake(x, weight, bias, left, right, shift, silu, channels_last):
    return _empty_rows(x, x.shape[2] + left + right - weight.shape[2] + 1, channels_last)


def _fake_backward(grad, x, weight, bias, left, shift, silu, channels_last, need_x, need_weight, need_bias):
    return (
        _empty_rows(x, x.shape[2], channels_last) if need_x else x.new_empty((0,)),
        x.new_empty(weight.shape if need_weight else (0,)),
        x.new_empty((x.shape[1] if need_bias else 0,)),
    )


ops.define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, SymInt left, SymInt right, float shift, bool silu, bool channels_last) -> Tensor",
    fake=_fake,
    layout=torch.Tag.needs_exact_strides,
)
ops.define(
    "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, SymInt left, float shift, bool silu,"
    " bool channels_last, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    layout=torch.Tag.needs_exact_strides,
)


# ---- what the graph computes ----


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


def _convolution(node: fx.Node) -> Convolution | Reject | None:
    """The depthwise convolution that a ``convolution`` or its backward stands for, the input's padding included."""
    args = g.arguments(node)
    source, weight = args["input"], args["weight"]
    if len(args["stride"]) != 1 or g.value(source).dim() != 3:
        return None
    channels, groups = g.value(source).shape[1], args["groups"]
    if groups == 1 and not (g.same_size(channels, 1) and g.same_size(g.value(weight).shape[0], 1)):
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
    unable = native.load().why_not(tensor.device)
    if unable:
        return Reject(unable, node)
    padding = args["padding"][0]
    padded = _unpad(source)
    if padded is None:
        return Convolution(source, weight, padding, padding)
    if isinstance(padded, Reject):
        return padded
    x, left, right = padded
    if g.is_joint(node.graph) and g.is_mutated_input(x):
        return Reject("the input is mutated later on: a backward needs its padded copy", node)
    if padding != 0:
        if isinstance(left, fx.Node) or isinstance(right, fx.Node):
            return Reject("a symbolic pad before a convolution with padding of its own", node)
        left, right = left + padding, right + padding
    return Convolution(x, weight, left, right)


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
    left, right = (_size_of(p) for p in pad[:2])
    if any(g.hint(p) is None or g.hint(p) < 0 for p in (left, right)):
        return Reject(f"the input is cropped by {pad}: only padding is accepted", node)
    if not all(isinstance(s, int) for s in (left, right)) and not _surely_pads(node):
        return Reject("a pad of a symbolic size that may become a crop", node)
    return args["self"], pad[0], pad[1]


def _size_of(size: Any) -> Any:
    return g.value(size) if isinstance(size, fx.Node) else size


def _surely_pads(node: fx.Node) -> bool:
    return all(statically_known_true(_size_of(p) >= 0) for p in node.args[1][:2])


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
    """A convolution with what follows it: ``nodes`` from the convolution to ``last``."""

    conv: Convolution
    bias: fx.Node | None
    left: Any
    right: Any
    shift: float
    pre: fx.Node  # the value before SiLU
    nodes: tuple[fx.Node, ...]


def _forward(node: fx.Node) -> Forward | Reject | None:
    """The convolution at ``node`` with the slice along time and the constant that follow it."""
    conv = _convolution(node)
    if not isinstance(conv, Convolution):
        return conv
    left, right, shift, last, nodes = conv.left, conv.right, 0.0, node, [node]
    cut = _single(last, aten.slice.Tensor)
    if cut is not None:
        kept = _kept(cut, conv)
        if kept is not None:
            left, right = kept
            last = cut
            nodes.append(cut)
    added = _single(last, aten.add.Tensor)
    if added is not None and not added.kwargs:
        constant = next((b for a, b in _either_order(added.args) if a is last and isinstance(b, (int, float))), None)
        if constant is not None and not isinstance(constant, bool) and math.isfinite(constant):
            shift, last = float(constant), added
            nodes.append(added)
    return Forward(conv, g.arguments(node)["bias"], left, right, shift, last, tuple(nodes))


def _kept(cut: fx.Node, conv: Convolution) -> tuple[Any, Any] | None:
    """The padding (left, right) of which only ``cut``, a slice along time, is left; None if it can't be said."""
    args = g.arguments(cut)
    if args["dim"] not in (2, -1) or args["step"] != 1 or args["start"] not in (0, None):
        return None
    length, whole = g.value(cut).shape[2], g.value(conv.x).shape[2]
    if isinstance(conv.left, fx.Node) or isinstance(conv.right, fx.Node):
        return None
    # x + left + right - taps + 1 = length
    right = length - whole - conv.left + conv.taps - 1
    if g.same_size(right, conv.right):
        right = conv.right
    if isinstance(right, torch.SymInt):
        right = next((r for r in (0, conv.right) if g.same_size(right, r)), None)
    return None if right is None else (conv.left, right)


def _silu(pre: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
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


def _channels_last(x: torch.Tensor, taps: Any) -> bool:
    """Whether the kernels should work in (batch, time, channels) memory order."""
    strides, sizes, taps = g.hints(x.stride()), g.hints(x.shape), g.hint(taps)
    if strides is None or sizes is None or taps is None or taps > CHANNELS_LAST_TAPS:
        return False
    return strides[1] == 1 and sizes[1] > 1 and strides[2] != 1 and sizes[2] > 1


def _in_order(emit: Emitter, node: fx.Node, channels_last: bool) -> fx.Node:
    """``node``, copied if its memory is in another order. The copy is Inductor's, so it fuses with the producer."""
    tensor = g.value(node)
    strides, sizes = g.hints(tensor.stride()), g.hints(tensor.shape)
    dim = 1 if channels_last else 2
    if strides is not None and (strides[dim] == 1 or sizes[dim] <= 1):
        return node
    if not channels_last:
        return emit.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    turned = emit.call(aten.permute.default, node, [0, 2, 1])
    turned = emit.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return emit.call(aten.permute.default, turned, [0, 2, 1])


def _restride(emit: Emitter, node: fx.Node, like: fx.Node) -> fx.Node:
    """``node`` with the strides of ``like``, by operators that Inductor fuses into whatever reads the result."""
    want = g.value(like)
    if g.difference(want, g.value(node)) is None:
        return node
    node = _in_order(emit, node, channels_last=False)
    if g.difference(want, g.value(node)) is None:
        return node
    # A slice of longer rows: make the rows as long again.
    pitch, length = want.stride(1), want.shape[2]
    if isinstance(pitch, int) and isinstance(length, int) and pitch > length and want.stride(2) == 1:
        longer = emit.call(aten.constant_pad_nd.default, node, [0, pitch - length], 0.0)
        return emit.call(aten.slice.Tensor, longer, 2, 0, length)
    return node


def _interior(nodes: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Of ``nodes``, those that only the outputs and each other use."""
    inside = set(outputs)
    for node in sorted(set(nodes) - inside, reverse=True):
        if all(u in inside for u in node.users):
            inside.add(node)
    return tuple(sorted(inside - set(outputs)))


class CausalConv1d(Pattern):
    """The forward, and inference."""

    name = "causal_conv1d"
    anchors = (aten.convolution.default,)
    level = "joint"

    def match(self, node: fx.Node) -> Match | Reject | None:
        found = _forward(node)
        if not isinstance(found, Forward):
            return found
        pre, silu = found.pre, False
        output, nodes = pre, list(found.nodes)
        activation = _silu(pre)
        if activation is not None and self._only_silu(found, activation[1]):
            output, silu = activation[0], True
            nodes += activation[1]
        interior = _interior(nodes, (output,))
        absorbed = [what for what, there in (("SiLU", silu), ("constant", found.shift != 0)) if there]

        def emit(e: Emitter) -> fx.Node:
            channels_last = _channels_last(g.value(found.conv.x), found.conv.taps)
            x = _in_order(e, found.conv.x, channels_last)
            y = e.call(
                torch.ops.fusebackend.causal_conv1d.default,
                *(x, found.conv.weight, found.bias, found.left, found.right, found.shift, silu, channels_last),
            )
            return _restride(e, y, output)

        return Match((output,), emit, interior, note=f"absorbs {' and '.join(absorbed)}" if absorbed else "")

    @staticmethod
    def _only_silu(found: Forward, silu: tuple[fx.Node, ...]) -> bool:
        """Whether nothing needs the value before SiLU: only SiLU itself and a backward that recomputes it use it."""
        inside = set(silu)
        for backward in _backwards_of(found):
            if isinstance(backward, Backward) and backward.silu:
                inside.update(backward.nodes)
        return all(u in inside for u in found.pre.users)


# ---- backward ----


@dataclasses.dataclass(frozen=True)
class Backward:
    """A convolution's backward: what it is of, and which of its results are used."""

    conv: Convolution
    bias: fx.Node | None
    grad: fx.Node
    left: Any
    shift: float
    silu: bool
    results: tuple[fx.Node | None, ...]  # the nodes of dx (uncropped), dw, db
    nodes: tuple[fx.Node, ...]


def _backwards_of(found: Forward) -> list[Backward | Reject | None]:
    """The backwards of the same convolution (same weight and padded input) in the joint graph."""
    weight = found.conv.weight
    users = {u for u in weight.users if u.target is aten.convolution_backward.default}
    return [_backward(u) for u in sorted(users) if u.args[1] is found.nodes[0].args[0]]


def _backward(node: fx.Node) -> Backward | Reject | None:
    conv = _convolution(node)
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
    if results[0] is not None and conv.x is not args["input"]:
        padded = results[0]
        crop = _single(padded, aten.constant_pad_nd.default)
        if crop is None or not _crops(crop, args["input"]):
            return Reject("the gradient of the padded input is not cropped by the padding", padded)
        results[0] = crop
        nodes.append(crop)

    grad, left = args["grad_output"], conv.left
    scattered = _unscatter(grad)
    if scattered is not None:
        nodes += [n for n in (grad, *grad.all_input_nodes) if n is not scattered]
        grad = scattered
    slope = _silu_slope(grad)
    if slope is not None:
        dy, pre, inner = slope
        found = _forward_of(pre)
        same = found is not None and found.conv == conv and found.pre is pre
        if same and g.same_size(g.value(pre).shape[2], g.value(grad).shape[2]):
            return Backward(conv, found.bias, dy, left, found.shift, True, tuple(results), (*nodes, *inner))
    return Backward(conv, None, grad, left, 0.0, False, tuple(results), tuple(nodes))


def _forward_of(pre: fx.Node) -> Forward | None:
    node = pre
    for _ in range(3):
        if node.target is aten.convolution.default:
            found = _forward(node)
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
    return all(g.same_size(_size_of(a), -_size_of(b)) for a, b in zip(forward, backward))


def _unscatter(grad: fx.Node) -> fx.Node | None:
    """The gradient that a slice's backward puts before zeros along time."""
    if grad.target is aten.slice_scatter.default:
        args = g.arguments(grad)
        zeros = args["self"]
        if args["dim"] not in (2, -1) or args["start"] not in (0, None) or args["step"] != 1:
            return None
        return args["src"] if zeros.target is aten.full.default and _is_scalar(zeros.args[1], 0) else None
    if grad.target is aten.constant_pad_nd.default:
        args = g.arguments(grad)
        pad = args["pad"]
        if len(pad) == 2 and pad[0] == 0 and isinstance(pad[1], int) and pad[1] >= 0 and args["value"] in (0, 0.0):
            return args["self"]
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


class CausalConv1dBackward(Pattern):
    """The backward."""

    name = "causal_conv1d_backward"
    anchors = (aten.convolution_backward.default,)
    level = "joint"

    def match(self, node: fx.Node) -> Match | Reject | None:
        found = _backward(node)
        if not isinstance(found, Backward):
            return found
        outputs = tuple(r for r in found.results if r is not None)
        if not outputs:
            return None
        interior = _interior(found.nodes, outputs)

        def emit(e: Emitter) -> list[fx.Node]:
            channels_last = _channels_last(g.value(found.conv.x), found.conv.taps)
            x = _in_order(e, found.conv.x, channels_last)
            grad = _in_order(e, found.grad, channels_last)
            needed = [r is not None for r in found.results]
            gradients = e.call(
                torch.ops.fusebackend.causal_conv1d_backward.default,
                *(grad, x, found.conv.weight, found.bias, found.left, found.shift, found.silu, channels_last, *needed),
            )
            picked = []
            for i, result in enumerate(found.results):
                if result is not None:
                    picked.append(_restride(e, e.call(operator.getitem, gradients, i), result))
            return picked

        return Match(outputs, emit, interior, note="absorbs SiLU" if found.silu else "")


register(CausalConv1d())
register(CausalConv1dBackward())
