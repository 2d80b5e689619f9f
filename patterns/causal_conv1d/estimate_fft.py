"""What convolutions that are written by FFT make a device do: our kernels with the copies that they need, and PyTorch's FFTs.

Inductor generates no code for complex numbers: it calls the FFT's library, and PyTorch's kernels for what lies between two transforms. All
of that is one kind of work, since it is whole convolutions that are timed. Transforms that others need too are computed in either form, and
are no part of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.fft_calls import Call, Kind
from fusebackend.patterns.causal_conv1d.operator_work import backward_work, forward_work
from fusebackend.patterns.causal_conv1d.spectrum import TIME, Factor
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import log2

aten = torch.ops.aten

_TRANSFORMS = frozenset({aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default})
_COMPLEX_VIEWS = frozenset({aten._conj.default, aten.view_as_real.default, aten.view_as_complex.default})

_UNKNOWN = Estimate(None, "a size depends on data, so it is not known whether the convolution pays", "unmeasured")
_EMPTY = Estimate(False, "the convolution is empty")


def fft_workload(calls: Sequence[Call], replaced: Sequence[fx.Node], backward: bool) -> Estimate | Workload:
    """The work of the convolutions of one direction that share transforms, both ways. ``replaced``: the matched nodes."""
    known = [call.sizes().known for call in calls]
    if any(k is None for k in known):
        return _UNKNOWN
    if any(0 in k[:5] for k in known if k is not None):
        return _EMPTY
    return Workload(tuple(map(_our_work, calls)), (_fft_work(replaced, calls[0], backward),))


def _our_work(call: Call) -> Work:
    sizes = call.sizes()
    assert sizes.known is not None
    copies = [2 * sizes.x_bytes] if _is_copied(call.product.x, call) else []
    pointwise = []
    if call.is_weight_gradient:
        copies += [2 * sizes.bytes] if _is_copied(call.product.k, call) else []
    elif call.kind is Kind.REVERSED or _is_copied(call.product.k, call):
        pointwise.append(2 * sizes.item * sizes.channels * sizes.taps)
    if call.product.scale != 1.0:
        pointwise.append(2 * sizes.item * sizes.channels * sizes.taps)
    if set(call.channels) & call.product.summed:
        results = sizes.channels * sizes.taps if call.is_weight_gradient else sizes.batch * sizes.channels * sizes.length
        pointwise.append(sizes.item * results)
    if call.is_weight_gradient:
        return backward_work(sizes, (False,) * 3, (False, True, False), copies=copies, pointwise=pointwise)
    return forward_work(sizes, False, False, copies=copies, pointwise=pointwise)


def _is_copied(factor: Factor, call: Call) -> bool:
    """Whether rows are broadcast, or brought into another order, before the call reads them."""
    own = [label for label in factor.labels if label is not None]
    wanted = [*call.batch, *call.channels, TIME] if factor is call.product.x or call.is_weight_gradient else [*call.channels, TIME]
    strides = g.hints(g.value(factor.rows.node).stride())
    return own != wanted or (strides is not None and strides[factor.rows.axis] != 1)


def _fft_work(nodes: Iterable[fx.Node], call: Call, backward: bool) -> Work:
    """The library's side. A view moves nothing; an operator on real numbers is a kernel that pads."""
    sizes = call.sizes()
    assert sizes.known is not None
    quantities = dict.fromkeys(("bytes", "points", "complex bytes", "pointwise bytes", "launches"), 0.0)
    points = 1
    for node in nodes:
        if not g.is_tensor(node) or g.is_view(node) or node.target in _COMPLEX_VIEWS:
            continue
        moved = sum(map(_bytes, [node, *node.all_input_nodes]))
        quantities["launches"] += 1
        if node.target in _TRANSFORMS:
            shapes = [g.hints(g.value(n).shape) or [] for n in (node, node.args[0]) if isinstance(n, fx.Node)]
            axis = node.args[1][0]  # type: ignore[index]
            points = max(shape[axis] for shape in shapes)
            rows = math.prod(shapes[0]) / max(shapes[0][axis], 1)
            quantities["bytes"] += moved
            quantities["points"] += rows * points * log2(points) * (1.0 if node.target is aten._fft_c2c.default else 0.5)
        elif g.value(node).is_complex():
            quantities["complex bytes"] += moved
        else:
            quantities["pointwise bytes"] += moved
    shape = {
        "log2 points": log2(points),
        "log2 largest factor": log2(_largest_prime_factor(points)),
        "log2 rows": log2(sizes.batch * sizes.channels),
        "log2 batch": log2(sizes.batch),
        "element": float(sizes.item),
        "dynamic": float(sizes.dynamic),
    }
    return Work(sizes.kind(f"fft convolution{' backward' * backward}"), quantities, shape)


def _bytes(node: fx.Node) -> float:
    value = g.value(node)
    if not isinstance(value, torch.Tensor):
        return 0.0
    return float(value.itemsize * math.prod(g.hints(value.shape) or [0]))


def _largest_prime_factor(n: int) -> int:
    """Libraries transform lengths of small prime factors faster."""
    largest, factor = 1, 2
    while factor * factor <= n:
        while n % factor == 0:
            largest, n = factor, n // factor
        factor += 1
    return max(largest, n)
