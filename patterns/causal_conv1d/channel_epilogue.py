"""Reads what follows a convolution and may be computed with it: batch norm in inference, a scale or shift of each channel, an activation.

Inductor decomposes batch norm in inference: ``(conv - mean) * rsqrt(variance + eps) * scale + shift``, in fp32 also where the convolution
is in 16 bits, with vectors that are unsqueezed to (C, 1) or (C, 1, 1). What is rounded to 16 bits in between may be left in fp32, as
Inductor leaves it where it fuses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.channel_activation import read_activation
from fusebackend.patterns.causal_conv1d.nodes import either_order, operands, times

aten = torch.ops.aten
prims = torch.ops.prims

_RESHAPES = frozenset({aten.unsqueeze.default, aten.view.default, aten.reshape.default})


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What follows a convolution.

    Attributes:
        output: the node that has the value: the convolution if nothing is absorbed.
        mean, variance, scale, shift: vectors of a number a channel, or None.
        eps: what is added to the variance.
        activation: a name of ``channel_reference.ACTIVATIONS``, or "".
        nodes: all nodes behind the convolution, the output included.
    """

    output: fx.Node
    mean: fx.Node | None = None
    variance: fx.Node | None = None
    scale: fx.Node | None = None
    shift: fx.Node | None = None
    eps: float = 0.0
    activation: str = ""
    nodes: tuple[fx.Node, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What an operator is told of it; nothing if nothing is absorbed."""
        return (self.mean, self.variance, self.scale, self.shift, self.eps, self.activation) if self.nodes else ()

    @property
    def is_affine(self) -> bool:
        return any(v is not None for v in (self.mean, self.variance, self.scale, self.shift))

    @property
    def absorbed(self) -> str:
        """What there is, for the report."""
        norm = "batch norm" if self.variance is not None else "a scale or shift" if self.is_affine else ""
        names = {"relu": "ReLU", "relu6": "ReLU6", "silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU"}
        return " and ".join(filter(None, (norm, names.get(self.activation, self.activation))))


def read_epilogue(conv: fx.Node) -> Epilogue:
    """The longest epilogue of a convolution's value ``conv`` of which nothing but its value is used elsewhere."""
    dtype = g.value(conv).dtype
    longest = Epilogue(conv)
    found: Epilogue | None = longest
    while found is not None:
        if g.value(found.output).dtype == dtype and _is_closed(conv, found):
            longest = found
        found = _with_next(found, dtype)
    return longest


def _with_next(found: Epilogue, dtype: torch.dtype) -> Epilogue | None:
    """``found`` with the next node, or activation, that is computed of its output."""
    at = found.output
    channels = g.value(at).shape[1]
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    if not found.activation:
        activation = read_activation(at)
        if activation is not None:
            name, output, nodes = activation
            return dataclasses.replace(found, output=output, activation=name, nodes=(*found.nodes, *nodes))
    for user in at.users:
        step: dict[str, Any] | None = None
        if user.target is prims.convert_element_type.default and user.args[1] in (dtype, sums):
            step = {}
        elif not found.activation:
            step = _read_affine(found, user, channels, (dtype, sums))
        if step is not None and g.value(user).dtype in (dtype, sums):
            return dataclasses.replace(found, output=user, nodes=(*found.nodes, user), **step)
    return None


def _read_affine(found: Epilogue, user: fx.Node, channels: Any, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any] | None:
    """What of an epilogue ``user`` adds to ``found``, if it may stand behind that."""
    at = found.output
    if found.shift is not None:
        return None
    difference = operands(user, aten.sub.Tensor)
    if difference is not None and difference[0] is at:
        mean = _vector(difference[1], at, channels, dtypes)
        is_first = (found.mean, found.variance, found.scale) == (None, None, None)
        return {"mean": mean} if mean is not None and is_first else None
    for first, second in either_order(operands(user, aten.mul.Tensor)):
        if first is not at or found.scale is not None:
            continue
        factor = _vector(second, at, channels, dtypes)
        if factor is None:
            continue
        inverse = _read_inverse_deviation(factor, dtypes) if found.variance is None else None
        return {"scale": factor} if inverse is None else {"variance": inverse[0], "eps": inverse[1]}
    for first, second in either_order(operands(user, aten.add.Tensor)):
        shift = _vector(second, at, channels, dtypes) if first is at else None
        if shift is not None:
            return {"shift": shift}
    return None


def _read_inverse_deviation(node: fx.Node, dtypes: tuple[torch.dtype, ...]) -> tuple[fx.Node, float] | None:
    """(variance, eps) if ``node`` is ``1 / sqrt(variance + eps)``, in the type of sums."""
    unscaled = times(1, node)
    node = node if unscaled is None else unscaled
    if node.target is aten.rsqrt.default:
        shifted = node.args[0]
    elif node.target is aten.reciprocal.default and node.args[0].target is aten.sqrt.default:
        shifted = node.args[0].args[0]
    else:
        return None
    pair = operands(shifted, aten.add.Tensor)
    if pair is None or not isinstance(pair[0], fx.Node) or not isinstance(pair[1], (int, float)) or isinstance(pair[1], bool):
        return None
    if g.value(shifted).dtype != dtypes[-1]:
        return None
    variance = _unwidened(pair[0], dtypes)
    return None if g.value(variance).dtype not in dtypes else (variance, float(pair[1]))


def _vector(node: Any, beside: fx.Node, channels: Any, dtypes: tuple[torch.dtype, ...]) -> fx.Node | None:
    """The vector of a number a channel that ``node`` shows as (C, 1, 1), or (1, C, 1, 1), beside a value of (batch, C, ...)."""
    if not g.is_tensor(node):
        return None
    shape, rank = g.value(node).shape, g.value(beside).dim()
    if len(shape) not in (rank - 1, rank):
        return None
    dims = {rank - 1: shape, rank: shape[1:]}[len(shape)]
    if not g.same_size(dims[0], channels) or not all(g.same_size(s, 1) for s in (*dims[1:], *shape[: len(shape) - len(dims)])):
        return None
    while node.op == "call_function" and node.target in _RESHAPES:
        node = node.args[0]
    if g.value(node).dim() != 1 or not g.same_size(g.value(node).shape[0], channels):
        return None
    node = _unwidened(node, dtypes)
    return node if g.value(node).dtype in dtypes and g.value(node).device == g.value(beside).device else None


def _unwidened(node: fx.Node, dtypes: tuple[torch.dtype, ...]) -> fx.Node:
    """Sees through a conversion to the type of sums, which the operator makes itself."""
    if node.target is prims.convert_element_type.default and node.args[1] == dtypes[-1] and g.value(node.args[0]).dtype in dtypes:
        return node.args[0]
    return node


def _is_closed(conv: fx.Node, epilogue: Epilogue) -> bool:
    """Whether only nodes of the epilogue use the values before its output."""
    inside = set(epilogue.nodes)
    return all(user in inside for node in (conv, *epilogue.nodes) if node is not epilogue.output for user in node.users)
