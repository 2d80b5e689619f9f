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

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader, ops
from fusebackend.patterns.causal_conv1d import graph as read
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject

aten = torch.ops.aten
prims = torch.ops.prims

# The CUDA kernels that work in (batch, time, channels) memory order, without a copy, are those for up to so many taps, by the bytes of an
# element. 16-bit tensor-core kernels for more are worth the copies.
CHANNELS_LAST_TAPS = {2: 8, 4: 32}
TURNED_TAPS = 4  # and from it into (batch, channels, time)
TURNED_SAMPLES = 8  # the gradients: of 16-bit types; worth it in whole vectors of so many channels and samples


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


causal_conv1d = ops.define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, SymInt left, SymInt right, float shift, bool silu, bool channels_last) -> Tensor",
    fake=_fake,
    layout=torch.Tag.needs_exact_strides,
)
causal_conv1d_backward = ops.define(
    "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, SymInt left, float shift, bool silu,"
    " bool channels_last, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    layout=torch.Tag.needs_exact_strides,
)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether (batch, channels, time) lies in memory as (batch, time, channels)."""
    strides, sizes = g.hints(tensor.stride()), g.hints(tensor.shape)
    return strides is not None and sizes is not None and strides[1] == 1 and sizes[1] > 1 and strides[2] != 1 and sizes[2] > 1


def _channels_last(conv: read.Convolution, wanted: torch.Tensor) -> bool:
    """Whether the kernels should write in (batch, time, channels) memory order. Those of CPUs go from any order to any other;
    those of GPUs stay in x's."""
    x, taps = g.value(conv.x), g.hint(conv.taps)
    if x.device.type == "cpu":
        return _is_channels_last(wanted)
    return taps is not None and taps <= CHANNELS_LAST_TAPS[conv.dtype.itemsize] and _is_channels_last(x)


def _is_causal(found: read.Forward | read.Backward, right: Any) -> bool:
    """Whether the padding is taps - 1 zeros before and, ``right``, none after: the result is as long as x."""
    return g.same_size(read.size_of(found.left), found.conv.taps - 1) and g.same_size(right, 0)


def _converted(emit: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if g.value(node).dtype == dtype else emit.call(prims.convert_element_type.default, node, dtype)


def _operand(emit: Emitter, node: fx.Node, channels_last: bool) -> fx.Node:
    """``node`` in a memory order that the kernels take."""
    return node if g.value(node).device.type == "cpu" else _in_order(emit, node, channels_last)


def _in_order(emit: Emitter, node: fx.Node, channels_last: bool) -> fx.Node:
    """``node``, copied if its memory is in another order. The copy is Inductor's, so it fuses with the producer."""
    tensor = g.value(node)
    strides, sizes = g.hints(tensor.stride()), g.hints(tensor.shape)
    dim = 1 if channels_last else 2
    if strides is not None and (strides[dim] == 1 or sizes[dim] <= 1):
        return node
    if not channels_last:
        return emit.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    turned = emit.call(aten.clone.default, _turn(emit, node), memory_format=torch.contiguous_format)
    return _turn(emit, turned)


def _restride(emit: Emitter, node: fx.Node, like: fx.Node, turned: bool = False) -> fx.Node:
    """``node`` with the strides of ``like``, by operators that Inductor fuses into whatever reads the result. ``turned``:
    ``like`` is (batch, time, channels), and so is what is returned."""
    if turned:
        return _turn(emit, _restrided(emit, node, g.value(like).transpose(1, 2)))
    return _restrided(emit, node, g.value(like))


def _turn(emit: Emitter, node: fx.Node) -> fx.Node:
    return emit.call(aten.permute.default, node, [0, 2, 1])


def _restrided(emit: Emitter, node: fx.Node, want: torch.Tensor) -> fx.Node:
    if g.difference(want, g.value(node)) is None:
        return node
    node = _in_order(emit, node, channels_last=_is_channels_last(want))
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
        found = read.forward(node)
        if not isinstance(found, read.Forward):
            return found
        unable = loader.load().why_not(g.value(node).device, causal_conv1d)
        if unable:
            return Reject(unable, node)
        pre, silu = found.pre, False
        output, nodes = pre, list(found.nodes)
        activation = read.silu(pre)
        if activation is not None and self._only_silu(found, activation[1]):
            output, silu = activation[0], True
            nodes += activation[1]
        interior = _interior(nodes, (output,))
        absorbed = [what for what, there in (("SiLU", silu), ("constant", found.shift != 0)) if there]

        def emit(e: Emitter) -> fx.Node:
            wanted = g.value(output).transpose(1, 2) if found.turned else g.value(output)
            channels_last = _channels_last(found.conv, wanted)
            x = _converted(e, found.conv.x, found.conv.dtype)
            if channels_last and self._turns(found, output, wanted):
                channels_last = False
            else:
                x = _operand(e, x, channels_last)
            y = e.call(
                causal_conv1d,
                *(x, found.conv.weight, found.bias, found.left, found.right, found.shift, silu, channels_last),
            )
            return _restride(e, y, output, found.turned)

        return Match((output,), emit, interior, note=f"absorbs {' and '.join(absorbed)}" if absorbed else "")

    @staticmethod
    def _turns(found: read.Forward, output: fx.Node, wanted: torch.Tensor) -> bool:
        """Whether a GPU's kernel should turn (batch, time, channels) into (batch, channels, time): where that is a result of the graph,
        whose strides are eager's. For anything else Inductor reads it in whatever order it is."""
        sizes, taps = g.hints(g.value(found.conv.x).shape), g.hint(found.conv.taps)
        if sizes is None or taps is None or _is_channels_last(wanted) or not any(u.op == "output" for u in output.users):
            return False
        return taps <= TURNED_TAPS and sizes[1] % 2 == 0 and _is_causal(found, read.size_of(found.right))

    @staticmethod
    def _only_silu(found: read.Forward, silu: tuple[fx.Node, ...]) -> bool:
        """Whether nothing needs the value before SiLU: only SiLU itself and a backward that recomputes it use it."""
        inside = set(silu)
        for backward in read.backwards_of(found):
            if isinstance(backward, read.Backward) and backward.silu:
                inside.update(backward.nodes)
        return all(u in inside for u in found.pre.users)


class CausalConv1dBackward(Pattern):
    """The backward."""

    name = "causal_conv1d_backward"
    anchors = (aten.convolution_backward.default,)
    level = "joint"

    def match(self, node: fx.Node) -> Match | Reject | None:
        found = read.backward(node)
        if not isinstance(found, read.Backward):
            return found
        unable = loader.load().why_not(g.value(found.grad).device, causal_conv1d_backward)
        if unable:
            return Reject(unable, node)
        outputs = tuple(r for r in found.results if r is not None)
        if not outputs:
            return None
        interior = _interior(found.nodes, outputs)

        def emit(e: Emitter) -> list[fx.Node]:
            channels_last = _channels_last(found.conv, g.value(found.results[0] or found.conv.x))
            x = _converted(e, found.conv.x, found.conv.dtype)
            if channels_last and self._turns(found):
                channels_last, grad = False, found.grad
            else:
                x = _operand(e, x, channels_last)
                grad = _operand(e, _turn(e, found.grad) if found.turned else found.grad, channels_last)
            needed = [r is not None for r in found.results]
            gradients = e.call(
                causal_conv1d_backward,
                *(grad, x, found.conv.weight, found.bias, found.left, found.shift, found.silu, channels_last, *needed),
            )
            picked = []
            for i, result in enumerate(found.results):
                if result is not None:
                    gradient = _converted(e, e.call(operator.getitem, gradients, i), g.value(result).dtype)
                    picked.append(_restride(e, gradient, result))
            return picked

        return Match(outputs, emit, interior, note="absorbs SiLU" if found.silu else "")

    @staticmethod
    def _turns(found: read.Backward) -> bool:
        """Whether a GPU's kernel should turn x alone, (batch, time, channels), where the gradient comes into the graph as (batch, channels,
        time), like eager's results, and x's is wanted so. Sizes that later turn out to be no whole vectors cost time, nothing else."""
        x, grad, dx = g.value(found.conv.x), g.value(found.grad), found.results[0]
        taps, strides = g.hint(found.conv.taps), g.hints(grad.stride())
        if found.turned or found.grad.op != "placeholder" or strides is None or strides[2] != 1 or taps is None or taps > TURNED_TAPS:
            return False
        sizes = g.hints(x.shape)
        if found.conv.dtype.itemsize != 2 or sizes is None or any(size % TURNED_SAMPLES for size in sizes[1:]):
            return False
        return _is_causal(found, grad.shape[2] - x.shape[2]) and (dx is None or not _is_channels_last(g.value(dx)))
