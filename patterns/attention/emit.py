"""Builds the replacement of an attention: the operators' calls, with the views and copies that they need."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import apply, arrange, by_tokens, contiguous, converted, copies, in_place_of, in_rows, steps
from fusebackend.patterns.attention.biases import Addend, emit_addend, emit_hidden_rows, number, with_contiguous_rows
from fusebackend.patterns.attention.dims import Axis, Dim, Dims, all_leaves, leaves, product
from fusebackend.patterns.attention.gradients import Backward
from fusebackend.patterns.attention.operands import Link
from fusebackend.patterns.attention.ops import attention, attention_backward, attention_mask_bits, limits
from fusebackend.patterns.attention.scores import Mask
from fusebackend.patterns.attention.site import Forward, Result
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Site:
    """An attention that is replaced.

    Attributes:
        queries, keys, values, grad: what the operators read.
        scale: of the products of ``queries`` and ``keys``.
        batch: the operators' dims before queries and keys: (batch, heads), or (batch, inner batch, heads).
        addends: the operators' biases.
        out: the node that the forward's result takes the place of.
        slots: for each of the backward's bias gradients, which of the addends it belongs to.
        causal: whether query i sees keys 0 to i alone, besides what the addends say.
    """

    forward: Forward
    backward: Backward | None
    queries: Link
    keys: Link
    values: Link
    grad: Link | None
    scale: float
    batch: tuple[Dim, ...]
    addends: tuple[Addend, ...]
    slots: tuple[int, ...]
    causal: bool = False

    @property
    def results(self) -> tuple[Result, ...]:
        """What is replaced: the forward's result, then the gradients."""
        return (self.forward.out, *(self.backward.results if self.backward is not None else ()))

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(self.placed(r)[0] for r in self.results)

    @property
    def scores_layout(self) -> tuple[Dim, ...]:
        return (*self.batch, self.forward.rows, self.forward.columns)

    @property
    def wide_slots(self) -> frozenset[int]:
        """The addends whose gradients are wanted in fp32."""
        gradients = self.backward.biases if self.backward is not None else ()
        return frozenset(i for i, b in zip(self.slots, gradients) if g.value(b.result.node).dtype == torch.float32)

    def scores_layout_of(self, addend: Addend) -> tuple[Dim, ...]:
        """The dims of an addend: none where it is broadcast."""
        return tuple(dim if any(a in addend.axes for a in leaves(dim)) else () for dim in self.scores_layout)

    def layout_of(self, result: Result) -> tuple[Dim, ...] | None:
        """The dims of what the operator returns for ``result``; None for a bias."""
        f, b = self.forward, self.backward
        if result is f.out:
            return (*self.batch, f.rows, f.width)
        if b is None:
            return None
        if result is b.queries:
            return (*self.batch, f.rows, f.depth)
        if result is b.keys:
            return (*self.batch, f.columns, f.depth)
        return (*self.batch, f.columns, f.width) if result is b.values else None

    def placed(self, result: Result) -> tuple[fx.Node, Dims]:
        """The node that ``result`` takes the place of: the first whose memory order the operator's result has, without a copy."""
        layout = self.layout_of(result)
        if layout is None or result.factor != 1.0:
            return result.node, result.dims
        example = g.value(self.queries.node)
        sizes = [product(a.size for a in leaves(dim)) for dim in layout]
        with example.fake_mode:
            made = example.new_empty((*sizes[:-3], sizes[-2], sizes[-3], sizes[-1])).transpose(-3, -2)
        for node, dims in ((result.node, result.dims), *result.further):
            views = steps(made, layout, dims, repeat=False)
            if not copies(views) and g.difference(g.value(node), apply(made, views)) is None:
                return node, dims
        return result.node, result.dims


def batch_dims(forward: Forward, addends: tuple[Addend, ...], queries: Link, most: int) -> tuple[Dim, ...]:
    """The batch axes as two dims of the operator, or ``most``, of which the last is that of the heads."""
    axes = [(axis,) for axis in leaves(forward.batch)]
    while len(axes) > most:
        merged = next((i for i in range(len(axes) - 1) if _are_alike(axes[i], axes[i + 1], addends)), 0)
        axes[merged : merged + 2] = [axes[merged] + axes[merged + 1]]
    if len(axes) == 3:
        return tuple(axes)
    if len(axes) == 1 and _is_inside_tokens(axes[-1], forward, queries):
        return (*[()] * (2 - len(axes)), *axes)
    return tuple(axes) if len(axes) == 2 else (*axes, *[()] * (2 - len(axes)))


def _are_alike(a: Dim, b: Dim, addends: tuple[Addend, ...]) -> bool:
    """Whether each bias has both axes or none of them."""
    return all(all(x in addend.axes for x in (*a, *b)) or not any(x in addend.axes for x in (*a, *b)) for addend in addends)


def _is_inside_tokens(dim: Dim, forward: Forward, queries: Link) -> bool:
    """Whether the queries of different heads lie nearer to one another in memory than those of different tokens."""
    strides: dict[Axis, Any] = {}
    for axes, stride in zip(queries.dims, g.value(queries.node).stride()):
        for axis in reversed(leaves(axes)):
            strides[axis] = g.hint(stride)
            stride = stride * axis.size
    row = next(iter(forward.rows), None)
    inner, outer = strides.get(dim[-1]), strides.get(row) if row is not None else None
    return inner is not None and outer is not None and inner < outer


def emit(e: Emitter, site: Site) -> list[fx.Node]:
    """The values of ``site.outputs``."""
    forward, backward = site.forward, site.backward
    rows, columns = forward.rows, forward.columns
    unscaled = operand(e, site, site.queries, (rows, forward.depth))
    query = in_rows(e, _padded(e, times_gain(e, site, unscaled)))
    key = in_rows(e, _padded(e, operand(e, site, site.keys, (columns, forward.depth))))
    value = in_rows(e, _padded(e, operand(e, site, site.values, (columns, forward.width))))
    biases = [with_contiguous_rows(e, emit_addend(e, a, site.scores_layout, forward.dtype)) for a in site.addends]
    dropped: tuple[Any, ...] = ()
    if forward.dropout is not None:
        mask = arrange(e, forward.dropout.mask, forward.dropout.dims, site.scores_layout, repeat=True)
        dropped = e.call(attention_mask_bits, mask), forward.dropout.scale
    made = e.call(attention, query, key, value, biases, site.scale, site.causal, *dropped)
    out, statistics = e.call(operator.getitem, made, 0), e.call(operator.getitem, made, 1)
    if forward.softmax.is_safe and site.addends:
        out, statistics = without_hidden_rows(e, out, statistics)
    found = [placed(e, site, forward.out, _without_padding(e, out, forward.width))]
    if backward is None:
        return found
    assert site.grad is not None
    grad = in_rows(e, _padded(e, operand(e, site, site.grad, (rows, forward.width))))
    if any(isinstance(term, Mask) and not math.isinf(term.fill) for addend in site.addends for term in addend.terms):
        statistics = _without_score_gradients(e, statistics, emit_hidden_rows(e, site.addends[-1], site.scores_layout))
    wanted, wide = ([i in slots for i in range(len(biases))] for slots in (site.slots, site.wide_slots))
    of_forward = out, statistics, site.scale, site.causal
    gradients = e.call(attention_backward, grad, query, key, value, biases, *of_forward, wanted, wide, *dropped)
    for i, result in enumerate((backward.queries, backward.keys, backward.values)):
        if result is not None:
            gradient = _without_padding(e, e.call(operator.getitem, gradients, i), forward.width if i == 2 else forward.depth)
            found.append(placed(e, site, result, times_gain(e, site, gradient) if i == 0 else gradient))
    for slot, bias in zip(site.slots, backward.biases):
        gradient = e.call(operator.getitem, gradients, 3 + sum(wanted[:slot]))
        gradient = _summed(e, bias.result, gradient, site.scores_layout_of(site.addends[slot]))
        found.append(contiguous(e, gradient) if gradient in found else gradient)
    if backward.gain is not None:  # scores before the gain, times their gradients, summed up over keys: queries times theirs
        gradient = _without_padding(e, e.call(operator.getitem, gradients, 0), forward.depth)
        products = [converted(e, node, torch.float32) for node in (gradient, unscaled)]
        layout = (*site.batch, rows, forward.depth)
        found.append(_summed(e, backward.gain.result, e.call(aten.mul.Tensor, *products), layout))
    return found


def times_gain(e: Emitter, site: Site, node: fx.Node) -> fx.Node:
    """Queries, or their gradients, times what multiplies the scores of each; rounded once."""
    gain = site.forward.scores.gain
    if gain is None:
        return node
    factor = arrange(e, gain.tensor, gain.dims, (*site.batch, site.forward.rows, ()), repeat=False)
    product = e.call(aten.mul.Tensor, converted(e, node, torch.float32), converted(e, factor, torch.float32))
    return converted(e, product, site.forward.dtype)


def operand(e: Emitter, site: Site, link: Link, inner: tuple[Dim, Dim]) -> fx.Node:
    node = arrange(e, link.node, link.dims, (*site.batch, *inner), repeat=True)
    return converted(e, node, site.forward.dtype)


def _padded(e: Emitter, node: fx.Node) -> fx.Node:
    """With heads of as many elements as the kernels take; zeros change no product."""
    size = g.value(node).shape[-1]
    wanted = padded_size(size)
    return node if wanted == size else e.call(aten.constant_pad_nd.default, node, [0, wanted - size], 0.0)


def _without_padding(e: Emitter, node: fx.Node, dim: Dim) -> fx.Node:
    size = product(axis.size for axis in dim)
    return node if g.value(node).shape[-1] == size else e.call(aten.slice.Tensor, node, -1, 0, size)


def padded_size(size: int) -> int:
    """Of a head of ``size`` elements; those that are too large stay as they are, and are refused."""
    _, most, multiple = limits()
    return size if size > most else -(-size // multiple) * multiple


def placed(e: Emitter, site: Site, result: Result, node: fx.Node) -> fx.Node:
    layout = site.layout_of(result)
    assert layout is not None
    place, dims = site.placed(result)
    node = converted(e, arrange(e, node, layout, dims, repeat=False), g.value(place).dtype)
    if result.factor != 1.0:
        node = e.call(aten.mul.Tensor, node, result.factor)
    return in_place_of(e, g.value(place), node)


def _summed(e: Emitter, result: Result, node: fx.Node, layout: tuple[Dim, ...]) -> fx.Node:
    """``result``, of which ``node`` has the axes, as ``layout`` says, and others."""
    held_as = layout
    kept, held = all_leaves(result.dims), all_leaves(layout)
    summed = [axis for axis in held if axis not in kept]
    if summed:  # of several tensors that were added up before they were added to the scores, one
        layout = tuple((axis,) for axis in held if axis in kept)
        dims = (*layout, *((axis,) for axis in summed))
        node = arrange(e, node, held_as, dims, repeat=False)
        node = e.call(aten.sum.dim_IntList, node, list(range(len(layout), len(dims))))
    node = arrange(e, node, layout, result.dims, repeat=False)
    if result.factor != 1.0:
        node = e.call(aten.mul.Tensor, node, result.factor)
    return in_place_of(e, g.value(result.node), converted(e, node, g.value(result.node).dtype))


def without_hidden_rows(e: Emitter, out: fx.Node, statistics: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Zeros in the rows whose scores are all -inf, and statistics by which the probabilities of such rows are zeros in the backward.
    ``out`` stays in the operator's memory order, which its readers want."""
    hidden = e.call(aten.eq.Scalar, e.call(aten.slice.Tensor, statistics, -1, 0, 1), -math.inf)
    zeros = number(e, out, 0.0, g.value(out).dtype)
    infinity = number(e, statistics, math.inf, g.value(statistics).dtype)
    of_tokens = contiguous(e, by_tokens(e, hidden))
    kept = e.call(aten.where.self, of_tokens, zeros, by_tokens(e, out))
    return by_tokens(e, kept), e.call(aten.where.self, hidden, infinity, statistics)


def _without_score_gradients(e: Emitter, statistics: fx.Node, rows: fx.Node) -> fx.Node:
    """The statistics by which the backward gives the scores of ``rows`` no gradients."""
    maxima, log_sums = (e.call(aten.slice.Tensor, statistics, -1, i, i + 1) for i in range(2))
    return e.call(aten.cat.default, [maxima, e.call(aten.where.self, rows, e.call(aten.neg.default, log_sums), log_sums)], -1)
