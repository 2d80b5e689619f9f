"""Builds the replacement of convolutions that are written by FFT: calls of this family's operators, which convolve the rows themselves.

No taps are reversed for it. The operators correlate; a convolution of x with k is what they compute as the gradient of an input, of which
``x`` is the incoming gradient and ``k`` the weight. The gradient of k is the operators' gradient of a weight, with x in the place of the
incoming gradient.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.fft_calls import Call, Kind
from fusebackend.patterns.causal_conv1d.memory_order import in_order
from fusebackend.patterns.causal_conv1d.ops import causal_conv1d, causal_conv1d_backward
from fusebackend.patterns.causal_conv1d.read_fft import Output, Site
from fusebackend.patterns.causal_conv1d.spectrum import TIME, Factor, size_of_label
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten
prims = torch.ops.prims


def emit_fft(e: Emitter, sites: Sequence[tuple[Site, Sequence[Call]]]) -> list[fx.Node]:
    """The values of the sites' outputs. Each is the sum of its calls."""
    builder = _Builder(e)
    return [builder.output(site.output, calls) for site, calls in sites]


@dataclasses.dataclass
class _Builder:
    """Rows that several calls read are arranged once."""

    e: Emitter
    arranged: dict[Any, fx.Node] = dataclasses.field(default_factory=dict)

    def output(self, output: Output, calls: Sequence[Call]) -> fx.Node:
        total: fx.Node | None = None
        for call in calls:
            value = self._labeled(self._called(call), call, output)
            total = value if total is None else self.e.call(aten.add.Tensor, total, value)
        assert total is not None
        return self._restrided(total, output)

    # ---- calls ----

    def _called(self, call: Call) -> fx.Node:
        """(batch, channels, samples); of a gradient of taps (channels, taps)."""
        x, k, e = call.product.x, call.product.k, self.e
        left = self._size(call.left)
        if call.kind is Kind.WEIGHT_GRADIENT:
            rows, grads = (self._rows(f, call) for f in (x, k))
            weight = self._like_weight(rows, call)
            gradients = e.call(causal_conv1d_backward, grads, rows, weight, None, left, 0.0, False, False, False, True, False)
            taps = e.call(aten.squeeze.dim, e.call(operator.getitem, gradients, 1), 1)
            return self._scaled(taps, call.product.scale)
        rows, weight = self._rows(x, call), self._weight(k, call)
        if call.kind is Kind.CORRELATION:
            return e.call(causal_conv1d, rows, weight, None, left, self._size(call.right), 0.0, False, False)
        if call.kind is Kind.CONVOLUTION:
            gradients = e.call(causal_conv1d_backward, rows, rows, weight, None, left, 0.0, False, False, True, False, False)
            return e.call(operator.getitem, gradients, 0)
        weight = e.call(torch.ops.prims.rev.default, weight, [2])  # what Inductor makes of a flip before it looks for families
        return e.call(causal_conv1d, rows, weight, None, left, self._size(call.right), 0.0, False, False)

    def _size(self, size: Any) -> Any:
        """An int, or the node of (a node's dim, an offset)."""
        if isinstance(size, int):
            return size
        node, dim, more = size
        found = self.e.call(aten.sym_size.int, node, dim)
        return self.e.call(operator.add, found, more) if more else found

    def _scaled(self, node: fx.Node, scale: float) -> fx.Node:
        return node if scale == 1.0 else self.e.call(aten.mul.Tensor, node, scale)

    def _like_weight(self, rows: fx.Node, call: Call) -> fx.Node:
        """A weight whose gradient is computed. Only its sizes matter."""
        like = call.weight
        if like is not None:
            return self._weight(like, call, scaled=False)
        value = g.value(rows)
        shape = [self._length_of(call.channels), 1, self._size(call.taps)]
        return self.e.call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device, pin_memory=False)

    # ---- operands ----

    def _rows(self, factor: Factor, call: Call) -> fx.Node:
        """(batch, channels, samples)."""
        return self._once(("rows", factor.rows, factor.labels, call.batch, call.channels), lambda: self._make_rows(factor, call))

    def _make_rows(self, factor: Factor, call: Call) -> fx.Node:
        groups = (call.batch, call.channels)
        made = self._grouped(factor, groups)
        return made if g.value(made).device.type == "cpu" else in_order(self.e, made, btc=False)

    def _weight(self, factor: Factor, call: Call, scaled: bool = True) -> fx.Node:
        """(channels, 1, taps)."""
        scale = call.product.scale if scaled else 1.0
        return self._once(
            ("weight", factor.rows, factor.labels, call.channels, scale), lambda: self._make_weight(factor, call.channels, scale)
        )

    def _make_weight(self, factor: Factor, channels: tuple[Any, ...], scale: float) -> fx.Node:
        grouped = self._grouped(factor, (channels,))
        return self.e.call(aten.unsqueeze.default, self._scaled(grouped, scale), 1)

    def _once(self, key: Any, make: Any) -> fx.Node:
        if key not in self.arranged:
            self.arranged[key] = make()
        return self.arranged[key]

    def _grouped(self, factor: Factor, groups: tuple[tuple[Any, ...], ...]) -> fx.Node:
        """The rows with one dim for the labels of each group, which it has or which it is broadcast along, and the samples last."""
        e, node, labels = self.e, factor.rows.node, list(factor.labels)
        dtype = torch.float64 if g.value(node).dtype == torch.float64 else torch.float32
        if g.value(node).dtype != dtype:  # rows that were converted to complex numbers
            node = e.call(prims.convert_element_type.default, node, dtype)
        wanted = [x for group in groups for x in group]
        dims = [d for d, x in enumerate(labels) if x is None]
        if dims:
            node = e.call(aten.squeeze.dims, node, dims)
            labels = [x for x in labels if x is not None]
        order = [labels.index(x) for x in (*wanted, TIME) if x in labels]
        if order != list(range(len(order))):
            node = e.call(aten.permute.default, node, order)
        missing = [i for i, x in enumerate(wanted) if x not in labels]
        for i in missing:
            node = e.call(aten.unsqueeze.default, node, i)
        if missing:
            sizes = [self._label_size(x) for x in wanted]
            node = e.call(aten.expand.default, node, [*sizes, -1])
        return self._merged(node, [len(group) for group in groups])

    def _merged(self, node: fx.Node, widths: list[int]) -> fx.Node:
        """Neighbouring dims, so many at a time, made one; the last dim stays."""
        if all(w == 1 for w in widths):
            return node
        value, first = g.value(node), 0
        sizes, strides = value.shape, value.stride()
        fits = True
        for width in widths:
            pairs = range(first, first + width - 1)
            fits &= all(g.same_size(strides[i], strides[i + 1] * sizes[i + 1]) for i in pairs)
            first += width
        if not fits:
            node = self.e.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        shape, first = list[Any](), 0
        for width in widths:
            shape.append(self._product([self._dim(node, i) for i in range(first, first + width)]))
            first += width
        return self.e.call(aten.view.default, node, [*shape, self._dim(node, first)])

    # ---- results ----

    def _labeled(self, made: fx.Node, call: Call, output: Output) -> fx.Node:
        """What a call returned with the output's dims."""
        e = self.e
        groups = (call.channels,) if call.kind is Kind.WEIGHT_GRADIENT else (call.batch, call.channels)
        labels = [x for group in groups for x in group]
        if any(len(group) != 1 for group in groups):
            made = e.call(aten.view.default, made, [*(self._label_size(x) for x in labels), self._dim(made, g.value(made).dim() - 1)])
        summed = [i for i, x in enumerate(labels) if x in call.product.summed]
        if summed:
            made = e.call(aten.sum.dim_IntList, made, summed)
            labels = [x for i, x in enumerate(labels) if i not in summed]
        labels.append(TIME)
        order = [labels.index(x) for x in output.labels if x is not None]
        if order != list(range(len(order))):
            made = e.call(aten.permute.default, made, order)
        for dim, label in enumerate(output.labels):
            if label is None:
                made = e.call(aten.unsqueeze.default, made, dim)
        return made

    def _restrided(self, node: fx.Node, output: Output) -> fx.Node:
        """``node`` with the strides that the original has, which may be those of a part of all ``n`` samples, or of real parts."""
        e, wanted = self.e, g.value(output.node)
        if g.difference(wanted, g.value(node)) is None:
            return node
        order = g.memory_order(g.value(output.rows)) or list(range(wanted.dim()))
        complex_pairs = output.rows is not output.inverse
        back = sorted(range(len(order)), key=order.__getitem__)
        is_part = output.node.target is aten.slice.Tensor or output.node is output.rows
        rest = self._rest(output) if is_part else None
        if rest is not None:
            node = e.call(aten.permute.default, node, order) if order != sorted(order) else node
            pads = [0] * (2 * (len(order) - order.index(output.axis)))
            pads[-2], pads[-1] = output.start, rest
            if complex_pairs:
                node, pads = e.call(aten.unsqueeze.default, node, len(order)), [0, 1, *pads]
            node = e.call(aten.constant_pad_nd.default, node, pads, 0.0)
            if complex_pairs:
                node = e.call(aten.select.int, node, len(order), 0)
            node = e.call(aten.permute.default, node, back) if order != sorted(order) else node
            if output.node is not output.rows:
                stop = self._stop(output)
                node = e.call(aten.slice.Tensor, node, output.axis, output.start, stop)
        if g.difference(wanted, g.value(node)) is None:
            return node
        order = g.memory_order(wanted) or order
        back = sorted(range(len(order)), key=order.__getitem__)
        inner = e.call(aten.clone.default, e.call(aten.permute.default, node, order), memory_format=torch.contiguous_format)
        return e.call(aten.permute.default, inner, back)

    def _rest(self, output: Output) -> Any:
        """How many of the transform's samples follow the output."""
        if isinstance(output.n, int) and isinstance(output.stop, int):
            return output.n - output.stop
        n = output.n if isinstance(output.n, int) else _node_of(output.n, output.inverse)
        return None if n is None else self.e.call(operator.sub, n, self._stop(output))

    def _stop(self, output: Output) -> Any:
        return output.stop if isinstance(output.stop, int) else output.node.args[3]

    # ---- sizes ----

    def _label_size(self, label: Any) -> Any:
        size = size_of_label(label)
        return size if isinstance(size, int) else self.e.call(aten.sym_size.int, *label)

    def _length_of(self, labels: tuple[Any, ...]) -> Any:
        return self._product([self._label_size(x) for x in labels])

    def _product(self, sizes: list[Any]) -> Any:
        if all(isinstance(s, int) for s in sizes):
            return math.prod(sizes)
        found = sizes[0]
        for size in sizes[1:]:
            found = self.e.call(operator.mul, found, size)
        return found

    def _dim(self, node: fx.Node, dim: int) -> Any:
        size = g.value(node).shape[dim]
        return size if isinstance(size, int) else self.e.call(aten.sym_size.int, node, dim)


def _node_of(size: Any, before: fx.Node) -> fx.Node | None:
    """A node whose value is a symbolic size."""
    for node in before.graph.nodes:
        if node is before:
            return None
        if isinstance(g.value(node), torch.SymInt) and g.same_size(g.value(node), size):
            return node
    return None
