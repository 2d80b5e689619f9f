"""Reads a depthwise convolution, or its backward, out of a joint graph: its operands, and the padding before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.nodes import size_of, unconverted
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A depthwise convolution of ``x``, padded by ``left`` and ``right`` zeros along time (ints or nodes)."""

    x: fx.Node
    weight: fx.Node
    left: Any
    right: Any

    @property
    def taps(self) -> Any:
        return g.value(self.weight).shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """What is convolved. Autocast converts ``x`` to it after the pad, and the gradient back before the crop."""
        return g.value(self.weight).dtype


def read_convolution(node: fx.Node) -> Convolution | Reject | None:
    """The depthwise convolution that a ``convolution`` or ``convolution_backward`` stands for, with the padding of its input."""
    args = g.arguments(node)
    source, weight = args["input"], args["weight"]
    if len(args["stride"]) != 1 or g.value(source).dim() != 3:
        return None
    channels, groups = g.value(source).shape[1], size_of(args["groups"])
    if g.same_size(groups, 1) and not (g.same_size(channels, 1) and g.same_size(g.value(weight).shape[0], 1)):
        return None  # every output depends on every channel: not a candidate
    tensor = g.value(source)
    if not g.same_size(groups, channels):
        return Reject(f"groups is {groups}, and there are {channels} channels: only depthwise convolutions are supported", node)
    if not g.same_size(g.value(weight).shape[0], channels):
        outputs = g.value(weight).shape[0]
        return Reject(f"{outputs} outputs for {channels} channels: only one output a channel is supported", node)
    if args["transposed"]:
        return Reject("transposed convolutions are not supported", node)
    if list(args["stride"]) != [1]:
        return Reject(f"stride {args['stride'][0]}: only stride 1 is supported", node)
    if list(args["dilation"]) != [1]:
        return Reject(f"dilation {args['dilation'][0]}: only dilation 1 is supported", node)
    if tensor.dtype not in DTYPES and not (tensor.dtype == torch.float64 and tensor.device.type == "cpu"):
        return Reject(f"dtype {tensor.dtype} on {tensor.device.type}: float32, float16 and bfloat16 are supported", node)
    padding = args["padding"][0]
    plain = unconverted(source)
    padded = _read_pad(plain)
    if padded is None or (isinstance(padded, Reject) and plain is not source):
        return Convolution(source, weight, padding, padding)
    if isinstance(padded, Reject):
        return padded
    x, left, right = padded
    if padding != 0:
        if isinstance(left, fx.Node) or isinstance(right, fx.Node):
            return Reject("a pad of symbolic size before a convolution that pads as well", node)
        left, right = left + padding, right + padding
    return Convolution(x, weight, left, right)


def _read_pad(node: fx.Node) -> tuple[fx.Node, Any, Any] | Reject | None:
    """(what is padded, left, right) of a pad with zeros along time; None if ``node`` is no pad."""
    if node.target is not aten.constant_pad_nd.default:
        return None
    args = g.arguments(node)
    pad = list(args["pad"]) or [0, 0]
    if args["value"] not in (0, 0.0, False, None):
        return Reject(f"the input is padded with {args['value']}: only zeros are a convolution's padding", node)
    if any(not isinstance(p, int) or p != 0 for p in pad[2:]):
        return Reject(f"the input is padded by {pad}: only padding along time, the last dimension, is supported", node)
    left, right = (size_of(p) for p in pad[:2])
    if any(g.hint(p) is None or g.hint(p) < 0 for p in (left, right)):
        return Reject(f"the input is cropped by {pad}: only padding is supported", node)
    if not all(isinstance(s, int) or statically_known_true(s >= 0) for s in (left, right)):
        return Reject("a pad of symbolic size that may become a crop", node)
    return args["self"], pad[0], pad[1]
