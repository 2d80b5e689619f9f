"""Variances and means over outer dims, read from the graph."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.sites import before_casts, rows_of, why_not_in
from fusebackend.rewriting.convolution_layout import gives_channels_last
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

MOMENTS = (aten.var_mean.correction, aten.var.correction)

_NCHW_DIMS = {0, 2, 3}
_CHANNELS_LAST = (0, 2, 3, 1)


@dataclasses.dataclass(frozen=True)
class Site:
    """A variance, with or without the mean, over dims outside of the innermost one.

    Attributes:
        node: it.
        source: what it is taken of, seen through casts that change no value.
        order: the dims of ``source`` in memory, outermost first; those that go are beside one another.
        begin, end: they are ``order[begin:end]``.
        keepdim: whether they stay, with size 1.
        correction: as ``aten.var`` takes it.
        dtype: of the results.
        is_relaid: whether ``order`` is Inductor's, and not that of the graph's strides.
        variance, mean: the nodes of the results; None where one is not used.
        scale: the node of ``rsqrt(variance + epsilon)``, if there is one.
        epsilon: what is added there.
        interior: the nodes between ``node`` and the results, which nothing else uses.
    """

    node: fx.Node
    source: fx.Node
    order: tuple[int, ...]
    begin: int
    end: int
    keepdim: bool
    correction: float
    dtype: torch.dtype
    is_relaid: bool
    variance: fx.Node | None
    mean: fx.Node | None
    scale: fx.Node | None
    epsilon: float
    interior: tuple[fx.Node, ...]

    @property
    def results(self) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
        """As the operator returns them."""
        return self.variance, self.mean, self.scale

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.results if n is not None)


def read(node: fx.Node) -> Site | Reject | None:
    """The moments at ``node``, one of ``MOMENTS``; why no kernel covers them; or None if the innermost dim goes, or it is no float."""
    call = g.arguments(node)
    x = call["self"]
    if not g.is_tensor(x) or not g.value(x).is_floating_point():
        return None
    value, source = g.value(x), before_casts(x)
    dims = call["dim"] or ()
    is_relaid = _is_relaid(source, value, dims)
    found = (_CHANNELS_LAST, 0, 3) if is_relaid else rows_of(node, value, dims)
    if not isinstance(found, tuple):
        return found
    reason = why_not_in(value.dtype, value.dtype)
    if reason:
        return Reject(reason, node)
    correction = 1 if call["correction"] is None else call["correction"]
    if not isinstance(correction, (int, float)):
        return Reject(f"a correction that is computed ({correction}) is not supported", node)
    variance, mean = _results(node)
    if variance is None and mean is None:
        return None
    interior = {node} - {variance}
    scale, epsilon = None, 0.0
    if variance is not None and value.dtype in (torch.float32, torch.float64):
        scale, epsilon, between = _scale_of(variance)
        if scale is not None and between is not None:
            interior.add(between)
            if set(variance.users) <= {between}:
                interior.add(variance)
                variance = None
    keepdim = bool(call["keepdim"])
    rest = float(correction), value.dtype, is_relaid, variance, mean, scale, epsilon, tuple(sorted(interior))
    return Site(node, source, *found, keepdim, *rest)


def _scale_of(variance: fx.Node) -> tuple[fx.Node | None, float, fx.Node | None]:
    """The node of ``rsqrt(variance + epsilon)``, epsilon, and the sum, which nothing else uses. Inductor would compute it again for every
    element that is normalised: what a kernel of its own gave is read there."""
    for total in variance.users:
        if total.target is not aten.add.Tensor or total.args[0] is not variance or len(total.users) != 1:
            continue
        epsilon, scale = total.args[1], next(iter(total.users))
        is_plain = isinstance(epsilon, (int, float)) and total.kwargs.get("alpha", 1) == 1
        if is_plain and scale.target is aten.rsqrt.default and g.value(total).dtype == g.value(variance).dtype:
            return scale, float(epsilon), total
    return None, 0.0, None


def _is_relaid(source: fx.Node, value: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Whether it is of a convolution's result, over all but its channels, which Inductor will lay out channels last though the graph does
    not say so."""
    if source.target is not aten.convolution.default or value.dim() != 4 or {d % 4 for d in dims} != _NCHW_DIMS:
        return False
    memory = g.memory_order(value)
    return memory is not None and memory[-1] != 1 and gives_channels_last(source)


def _results(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The nodes of the variance and of the mean, where something uses them."""
    if node.target is aten.var.correction:
        return node, None
    found = {user.args[1]: user for user in node.users if user.target is operator.getitem and user.users}
    return found.get(0), found.get(1)
