"""Which calls of the operators compute the products of an output: which labels are batch and channels, which operand is the weight."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.operator_work import Sizes
from fusebackend.patterns.causal_conv1d.read_fft import Group, Output, Product, Site
from fusebackend.patterns.causal_conv1d.spectrum import TIME, Factor, Rows, size_of_label
from fusebackend.rewriting.pattern import Reject


class Kind(enum.Enum):
    """How a product is computed."""

    CONVOLUTION = "as the gradient of an input"
    REVERSED = "a convolution of another length than x: a correlation with reversed taps"
    CORRELATION = "as the operator is"
    WEIGHT_GRADIENT = "as the gradient of a weight"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        product: what it computes.
        batch, channels: labels, of the dims that are merged to these.
        left, right, taps: each an int, or (node, dim, offset) for a symbolic size and a number that is added to it.
        length: samples that the output has.
        weight: for a gradient of a weight, rows with the sizes of that weight, if there are any.
    """

    product: Product
    kind: Kind
    batch: tuple[Any, ...]
    channels: tuple[Any, ...]
    left: Any
    right: Any
    taps: Any
    length: Any
    weight: Factor | None = None

    @property
    def is_weight_gradient(self) -> bool:
        return self.kind is Kind.WEIGHT_GRADIENT

    def sizes(self) -> Sizes:
        """The sizes of the convolution that runs; of a gradient of a weight, those of the convolution that it belongs to."""
        x, k, value = self.product.x.rows, self.product.k.rows, g.value(self.product.x.rows.node)
        length, taps, left = (k.length, self.length, self.left) if self.is_weight_gradient else (self.length, k.length, self.left)
        if self.kind is Kind.CONVOLUTION:  # a gradient of an input
            left = k.length - 1 - left
        elif not isinstance(left, int):
            left = g.value(left[0]).shape[left[1]] + left[2]
        groups = [math.prod(size_of_label(label) for label in group) for group in (self.batch, self.channels)]
        known = g.hints((*groups, x.length, length, taps, left))
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        return Sizes(known, dtype, value.device, any(isinstance(s, torch.SymInt) for s in value.shape))


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which rows are convolved, and which are their weights, by the convolutions of a group.

    Attributes:
        factors: the weights of correlations, labeled as these are.
    """

    inputs: frozenset[Rows]
    weights: frozenset[Rows]
    factors: tuple[Factor, ...]


def roles_of(group: Group) -> Roles:
    inputs, weights, factors = set[Rows](), set[Rows](), list[Factor]()
    for site in group.sites:
        for product in site.products:
            if not product.correlates:
                x, k = _input_and_weight(product, site.output)
                inputs.add(x.rows)
                weights.add(k.rows)
    for site in group.sites:
        factors += (p.k for p in site.products if p.correlates and p.k.rows in weights)
    return Roles(frozenset(inputs), frozenset(weights), tuple(factors))


def calls_of(site: Site, roles: Roles) -> list[Call] | Reject:
    """The calls whose results add up to the output."""
    found = []
    for product in site.products:
        call = _call(product, site.output, roles)
        if isinstance(call, Reject):
            return call
        found.append(call)
    return found


def _input_and_weight(product: Product, output: Output) -> tuple[Factor, Factor]:
    """A weight has no batch: it lacks the first dim of the output, or has fewer dims."""
    x, k = product.x, product.k
    first = next((label for label in output.labels if label not in (None, TIME)), None)
    if (first in x.labels) != (first in k.labels):
        return (x, k) if first in x.labels else (k, x)
    counts = [sum(label is not None for label in f.labels) for f in (x, k)]
    return (x, k) if counts[0] >= counts[1] else (k, x)


def _call(product: Product, output: Output, roles: Roles) -> Call | Reject:
    if not product.correlates:
        x, k = _input_and_weight(product, output)
        product = dataclasses.replace(product, x=x, k=k)
    x, k, shift, start = product.x, product.k, product.shift, output.start
    kept = [label for label in output.labels if label not in (None, TIME)]
    if product.correlates and (k.rows in roles.inputs if k.rows in roles.inputs | roles.weights else bool(product.summed)):
        order = _order(x, kept, product)
        batch = _leading(order, product.summed)
        taps = _symbolic(output.length, product)
        if taps is None:
            return _unknown(output)
        channels = tuple(order[len(batch) :])
        return Call(product, Kind.WEIGHT_GRADIENT, batch, channels, shift - start, 0, taps, output.length, _like(channels, output, roles))
    order = _order(x, kept, product)
    batch = _leading(order, set(order) - set(k.labels))
    channels = tuple(order[len(batch) :])
    if not product.correlates and g.same_size(output.length, x.rows.length):
        return Call(product, Kind.CONVOLUTION, batch, channels, start - shift, 0, 0, output.length)
    if product.correlates:
        kind, left = Kind.CORRELATION, shift - start
        right = _symbolic(output.stop - x.rows.length - shift + k.rows.length - 1, product)
    else:
        kind, left = Kind.REVERSED, _symbolic(k.rows.length - 1 - start + shift, product)
        right = _symbolic(output.stop - x.rows.length - shift, product)
    if left is None or right is None:
        return _unknown(output)
    return Call(product, kind, batch, channels, left, right, 0, output.length)


def _unknown(output: Output) -> Reject:
    return Reject("the padding depends on several symbolic lengths", output.inverse)


def _order(x: Factor, kept: list[Any], product: Product) -> list[Any]:
    """All labels, as x has them where it has all."""
    own = [label for label in x.labels if label not in (None, TIME)]
    return own if set(own) == {*kept, *product.summed} else [*(label for label in own if label in product.summed), *kept]


def _leading(order: list[Any], those: Any) -> tuple[Any, ...]:
    count = 0
    while count < len(order) and order[count] in those:
        count += 1
    return tuple(order[:count])


def _like(channels: tuple[Any, ...], output: Output, roles: Roles) -> Factor | None:
    """Rows of weights that have, or are broadcast along, these channels, and have as many samples as the output."""
    for factor in roles.factors:
        labels = {label for label in factor.labels if label not in (None, TIME)}
        if g.same_size(factor.rows.length, output.length) and labels <= set(channels):
            return factor
    return None


def _symbolic(size: Any, product: Product) -> Any:
    """An int, or (node, dim, offset) if the size is that of one of the operands' rows, up to a number; None if it is neither."""
    constant = _constant(size)
    if constant is not None:
        return constant
    for rows in (product.k.rows, product.x.rows):
        more = _constant(size - rows.length)
        if more is not None:
            return rows.node, rows.axis, more
    return None


def _constant(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    assert isinstance(size, torch.SymInt)
    expression = size.node.expr
    return int(expression) if expression.is_Integer else None


def all_calls(sites: Sequence[Site], roles: Roles) -> list[tuple[Site, list[Call]]] | Reject:
    found = []
    for site in sites:
        calls = calls_of(site, roles)
        if isinstance(calls, Reject):
            return calls
        found.append((site, calls))
    return found
