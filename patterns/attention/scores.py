"""Reads the scores of an attention out of a graph: from the input of the softmax back to the product of queries and keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import Dim, Dims, after, broadcast, fresh, is_cast, is_view
from fusebackend.patterns.attention.numbers import rounded, scaling, uniform
from fusebackend.patterns.attention.operands import PRODUCTS
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

_MOST_STEPS = 40
_GAINS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_MOST_BRANCHES = 200


@dataclasses.dataclass(frozen=True)
class Bias:
    """``factor * node``, which is added to the scores; ``dims`` are those of ``node``."""

    node: fx.Node
    dims: Dims
    factor: float


@dataclasses.dataclass(frozen=True)
class Mask:
    """``fill`` in place of the scores where ``condition`` is ``hides``; ``node`` is the ``where``.

    Attributes:
        shifted: whether a number, which is left out, was added to the scores that it does not hide.
    """

    node: fx.Node
    condition: fx.Node
    dims: Dims
    hides: bool
    fill: float
    shifted: bool = False


@dataclasses.dataclass(frozen=True)
class Gain:
    """A tensor that multiplies the scores before terms are applied, as Swin v2's learned scale of each head does.

    Attributes:
        tensor: by what they are multiplied; ``dims`` are its dims.
        of: the scores before, which the gradient of ``tensor`` is computed of; ``of_dims`` are their dims.
        factor_after: by what the scores are scaled afterwards.
    """

    tensor: fx.Node
    dims: Dims
    of: fx.Node
    of_dims: Dims
    factor_after: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a softmax is taken of: ``scale * gain * left @ right``, with terms applied to it in this order.

    Attributes:
        product: the node of the product of queries and keys.
        left, right: its operands.
        left_dims, right_dims, product_dims: their dims.
        nodes: from the product to the last term.
        dims: of the last of them, the input of the softmax.
    """

    product: fx.Node
    left: fx.Node
    right: fx.Node
    left_dims: Dims
    right_dims: Dims
    scale: float
    terms: tuple[Bias | Mask, ...]
    nodes: tuple[fx.Node, ...]
    dims: Dims
    gain: Gain | None = None

    @property
    def product_dims(self) -> Dims:
        return (*self.left_dims[:-1], self.right_dims[-1])

    @property
    def batch(self) -> Dim:
        return self.left_dims[0] if len(self.left_dims) == 3 else ()


@dataclasses.dataclass(frozen=True)
class _Step:
    """``node`` is computed from ``inner``, elements of which it scales by ``factor``, or multiplies by ``gain``; then a term may be added,
    or elements be replaced. ``shifts``: a number is added to all, which changes no softmax."""

    node: fx.Node
    inner: fx.Node
    factor: float = 1.0
    added: fx.Node | None = None
    added_factor: float = 1.0
    condition: fx.Node | None = None
    hides: bool = True
    fill: float = 0.0
    shifts: bool = False
    gain: fx.Node | None = None


def read_scores(last: fx.Node) -> Scores | Reject | None:
    """The scores whose last node is ``last``; a reason where a product is behind something else; None where there is none."""
    search = _Search()
    steps = search.path(last)
    if steps is None:
        return search.failure
    product = steps[-1].inner if steps else last
    if product.target is aten.mm.default and g.value(last).dim() > 2:
        return None  # the product of a layer with its weights
    arguments = product.args[-2:] if product.target in PRODUCTS else product.args[1:3]
    left, right = arguments
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    left_dims = fresh(g.value(left).shape)
    columns = fresh(g.value(right).shape)
    right_dims = (*left_dims[:-2], left_dims[-1], columns[-1])
    dims: Dims | None = (*left_dims[:-1], columns[-1])
    scale, factor_after = 1.0, list[float]()
    for step in steps:  # from the softmax to the product
        factor_after.append(scale)
        scale *= step.factor
    terms: list[Bias | Mask] = []
    if product.target is aten.baddbmm.default:
        given = g.arguments(product)
        added = broadcast(dims, given["self"])
        beta, alpha = uniform(given["beta"]), uniform(given["alpha"])
        if added is None or beta is None or alpha is None:
            return Reject("baddbmm with a bias of symbolic sizes or factors", product)
        if beta != 0:
            terms.append(Bias(given["self"], added, beta * scale))
        scale *= alpha
    shifted, gain = False, None
    for place, outer in reversed(list(enumerate(factor_after))):
        step = steps[place]
        assert dims is not None
        dims = after(step.node, dims) if step.added is None and step.condition is None else dims
        if dims is None:
            return Reject(f"{g.describe(step.node)} arranges the scores in a way that is not followed", step.node)
        shifted |= step.shifts
        if step.gain is not None:
            gain_dims = broadcast(dims, step.gain)
            if gain is not None or terms or shifted or gain_dims is None:
                return Reject("a tensor multiplies scores to which something was added, or that were multiplied before", step.node)
            gain = Gain(step.gain, gain_dims, step.inner, dims, outer)
        other = step.added if step.added is not None else step.condition
        if other is None:
            continue
        other_dims = broadcast(dims, other)
        if other_dims is None:
            return Reject("along which dims a bias or mask is broadcast is not known before run time", step.node)
        if step.added is not None:
            terms.append(Bias(step.added, other_dims, outer * step.added_factor))
        else:
            assert step.condition is not None
            terms.append(Mask(step.node, step.condition, other_dims, step.hides, _fill_after(step.fill, steps[:place]), shifted))
    nodes = (product, *(step.node for step in reversed(steps)))
    return Scores(product, left, right, left_dims, right_dims, scale, tuple(terms), nodes, dims, gain)


def _fill_after(fill: float, steps: Sequence[_Step]) -> float:
    """What the steps from the softmax on make of a number that was filled in: scaled, it may overflow to infinity."""
    for step in reversed(steps):
        fill = rounded(fill * step.factor, g.value(step.node).dtype)
    return fill


class _Search:
    """Looks for the product behind a node, through every operand that may hold the scores."""

    def __init__(self) -> None:
        self.failure: Reject | None = None
        self.visited: set[fx.Node] = set()

    def path(self, node: fx.Node, depth: int = 0) -> list[_Step] | None:
        """The steps from ``node`` to a product, outermost first."""
        if node.target in PRODUCTS or node.target is aten.baddbmm.default:
            return []
        if node in self.visited or depth == _MOST_STEPS or len(self.visited) > _MOST_BRANCHES:
            return None
        self.visited.add(node)
        steps = list(_steps(node))
        for step in steps:
            rest = self.path(step.inner, depth + 1)
            if rest is not None:
                return [step, *rest]
        if not steps and self.failure is None and _is_computed(node):
            self.failure = Reject(f"{g.describe(node)} between the product and the softmax is not followed", node)
        return None


def _is_computed(node: fx.Node) -> bool:
    return node.op == "call_function" and g.is_tensor(node)


def _steps(node: fx.Node) -> Iterator[_Step]:
    """The ways in which ``node`` may be computed from scores."""
    if not g.is_tensor(node) or node.op != "call_function":
        return
    if is_view(node) or is_cast(node):
        yield _Step(node, node.args[0])  # type: ignore[arg-type]
        return
    scaled = scaling(node)
    if scaled is not None:
        yield _Step(node, scaled[0], scaled[1])
        return
    if node.target is aten.copy.default:  # what an operation in place on a view becomes
        source = node.args[1]
        if isinstance(source, fx.Node) and _has_shape_of(source, node) and g.value(source).dtype == g.value(node).dtype:
            yield _Step(node, source)
        return
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        yield from _sums(node)
    if node.target is aten.mul.Tensor:
        for inner, gain in (node.args, reversed(node.args)):
            if _has_shape_of(inner, node) and g.is_tensor(gain) and g.value(gain).dtype in _GAINS:
                yield _Step(node, inner, gain=gain)  # type: ignore[arg-type]
    if node.target is aten.where.self:
        condition, x, y = node.args
        for inner, other, hides in ((y, x, True), (x, y, False)):
            fill = uniform(other)
            if fill is not None and _has_shape_of(inner, node):
                yield _Step(node, inner, condition=condition, hides=hides, fill=fill)


def _sums(node: fx.Node) -> Iterator[_Step]:
    given = g.arguments(node)
    alpha = uniform(given["alpha"])
    if alpha is None:
        return
    sign = alpha if node.target is aten.add.Tensor else -alpha
    first, second = given["self"], given["other"]
    for inner, factor, added, added_factor in ((first, 1.0, second, sign), (second, sign, first, 1.0)):
        if not _has_shape_of(inner, node):
            continue
        number = uniform(added)
        if number is not None and math.isfinite(number) and abs(number) < 1e4:
            yield _Step(node, inner, factor, shifts=number != 0)
        elif g.is_tensor(added):
            yield _Step(node, inner, factor, added, added_factor)


def _has_shape_of(inner: object, node: fx.Node) -> bool:
    if not isinstance(inner, fx.Node) or not g.is_tensor(inner) or not g.value(inner).dtype.is_floating_point:
        return False
    return g.same_sizes(g.value(inner).shape, g.value(node).shape)
