"""Reads the backward of an attention out of a joint graph: which nodes are the gradients of queries, keys, values and biases."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.conditions import holds_everywhere
from fusebackend.patterns.attention.dims import Axis, Dims, after, all_leaves, broadcast, is_cast, is_expansion, is_view, leaves
from fusebackend.patterns.attention.dropout import Dropout, masking
from fusebackend.patterns.attention.numbers import same_number, scaling, uniform
from fusebackend.patterns.attention.operands import PRODUCTS, Link, Operand, factors, read_operand, split_product
from fusebackend.patterns.attention.scores import Gain
from fusebackend.patterns.attention.site import Forward, Result, end_of
from fusebackend.patterns.attention.softmax import SoftmaxGradient, holders, read_softmax_gradient
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class BiasGradient:
    """A node that is ``result.factor`` times the gradient of the scores, summed over all axes but ``axes``."""

    result: Result

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(all_leaves(self.result.dims))


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward of an attention.

    Attributes:
        grad: the gradient of the forward's result.
        queries, keys, values: their gradients, None where they are not computed.
        biases: the gradients of biases.
        gain: that of what multiplies the scores.
        masks: nodes that compute numbers of the mask of dropout.
        query_source, key_source: of what ``queries`` and ``keys`` are the gradients.
        needed: the nodes that must go: nobody else may use them.
    """

    grad: Operand
    queries: Result | None
    keys: Result | None
    values: Result | None
    biases: tuple[BiasGradient, ...]
    query_source: Link | None
    key_source: Link | None
    needed: tuple[fx.Node, ...]
    masks: tuple[fx.Node, ...] = ()
    gain: BiasGradient | None = None

    @property
    def results(self) -> tuple[Result, ...]:
        found = (self.queries, self.keys, self.values, *(b.result for b in (*self.biases, *([self.gain] if self.gain is not None else []))))
        return tuple(r for r in found if r is not None)


def read_backward(forward: Forward) -> Backward | Reject | None:
    """The backward of ``forward``; None if there is none; a reason if the probabilities are used in another way."""
    if not forward.others:
        return None
    softmax = read_softmax_gradient(set(forward.held))
    grad, path, masks = None, tuple[fx.Node, ...](), tuple[fx.Node, ...]()
    if softmax is not None:
        read = _read_probabilities_gradient(forward, softmax)
        if isinstance(read, Reject):
            return read
        grad, path, masks = read
    values: Result | None = None
    inside = set(softmax.nodes) if softmax is not None else set[fx.Node]()
    needed = [*path, *(softmax.nodes if softmax is not None else ())]
    for holder, user in forward.others:
        if user in inside:
            continue
        found = _read_values_gradient(forward, holder, user, grad) if factors(user) is not None else None
        if found is None or values is not None:
            return Reject(f"{g.describe(user)} also uses the probabilities", user, "illegal")
        if isinstance(found, Reject):
            return found
        values, grad = found
    if grad is None:
        return None
    if softmax is None:
        return Backward(grad, None, None, values, (), None, None, tuple(needed))
    found = _read_scores_gradient(forward, softmax, grad, values, needed)
    return found if isinstance(found, Reject) else dataclasses.replace(found, masks=masks)


def _read_probabilities_gradient(
    forward: Forward, softmax: SoftmaxGradient
) -> tuple[Operand, tuple[fx.Node, ...], tuple[fx.Node, ...]] | Reject:
    """(the gradient of the result, the nodes from the product with the values to the softmax's gradient, those that compute numbers of the
    mask of dropout)."""
    path: list[fx.Node] = []
    factor, masked, masks = 1.0, set[fx.Node](), list[fx.Node]()
    node: Any = softmax.grad
    while isinstance(node, fx.Node):
        step = _multiplied(node, forward.dropout)
        if step is not None:
            path.append(node)
            factor *= step[1]
            if step[2] is not None:
                masked.add(node)
                masks += step[2]
            node = step[0]
        elif (is_view(node) or is_cast(node)) and not is_expansion(node):
            path.append(node)
            node = node.args[0]
        else:
            break
    unknown = Reject(f"{g.describe(node)} adds to the gradient of the probabilities, or changes it", node)
    if not isinstance(node, fx.Node) or node.target not in PRODUCTS:
        return unknown
    dropout = forward.dropout
    if (len(masked), factor) != (0, 1.0) if dropout is None else len(masked) != 1 or not same_number(factor, dropout.scale):
        return Reject("the gradient of the probabilities is not multiplied by what the probabilities are", softmax.grad, "illegal")
    first, second = node.args
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    for other, of_values, is_first in ((first, second, False), (second, first, True)):
        known = forward.values.dims_of(of_values, forward.dtype)
        if known is None:
            continue
        summed, keys = (known[-1], known[-2]) if is_first else (known[-2], known[-1])
        if leaves(summed) != forward.width or leaves(keys) != forward.columns:
            continue
        batch = known[:-2]
        dims = (*batch, summed, forward.rows) if is_first else (*batch, forward.rows, summed)
        result: Dims | None = (*batch, keys, forward.rows) if is_first else (*batch, forward.rows, keys)
        for step_node in reversed(path):
            result = None if result is None else after(step_node, result)
            if step_node in masked and (result is None or dropout is None or not _are_alike(result, dropout.dims)):
                return unknown
        if result is not None and [leaves(d) for d in result] == [leaves(d) for d in forward.held[softmax.of]]:
            return read_operand(other, dims), (node, *path), tuple(masks)
    return unknown


def _are_alike(a: Dims, b: Dims) -> bool:
    return [leaves(d) for d in a] == [leaves(d) for d in b]


def _multiplied(node: fx.Node, dropout: Dropout | None) -> tuple[fx.Node, float, tuple[fx.Node, ...] | None] | None:
    """(x, factor, None) if ``node`` is ``factor * x``; with the nodes that make numbers of the mask, if it is that times the mask of
    ``dropout``. None without dropout."""
    if dropout is None:
        return None
    scaled = scaling(node)
    if scaled is not None:
        return scaled[0], scaled[1], None
    for x in node.args:
        how = masking(node, x) if isinstance(x, fx.Node) else None
        if how is not None and how.mask is dropout.mask:
            return x, how.factor, how.nodes  # type: ignore[return-value]
    return None


def _read_values_gradient(
    forward: Forward, holder: fx.Node, product: fx.Node, grad: Operand | None
) -> tuple[Result, Operand] | Reject | None:
    """(the gradient of the values, that of the result) if ``product`` multiplies transposed probabilities by the latter."""
    if holder not in forward.multiplied:
        return None
    dims = forward.multiplied[holder]
    is_first = product.args[0] is holder
    other: Any = product.args[1] if is_first else product.args[0]
    _, rows, columns = split_product(dims)
    if (columns if is_first else rows) != forward.rows or (rows if is_first else columns) != forward.columns:
        return None
    if grad is None:
        if not g.same_size(g.value(other).shape[-1 if is_first else -2], _size(forward.width)):
            return None
        inner = (forward.rows, forward.width) if is_first else (forward.width, forward.rows)
        known: Dims | None = (*dims[:-2], *inner)
        assert known is not None
        grad = read_operand(other, known)
    else:
        known = grad.dims_of(other, forward.dtype)
        if known is None or leaves(known[-1 if is_first else -2]) != forward.width:
            return None
    if [leaves(d) for d in known[:-2]] != [leaves(d) for d in dims[:-2]]:
        return None
    inner = (forward.columns, forward.width) if is_first else (forward.width, forward.columns)
    end = end_of(product, (*known[:-2], *inner), 1.0, forward.dtype)
    return end if isinstance(end, Reject) else (end, grad)


def _size(axes: tuple[Axis, ...]) -> Any:
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size


def _read_scores_gradient(
    forward: Forward, softmax: SoftmaxGradient, grad: Operand, values: Result | None, needed: list[fx.Node]
) -> Backward | Reject:
    """Follows the gradient of the scores to the gradients of queries, keys and biases."""
    conditions = {(mask.condition, mask.hides) for mask in forward.masks}
    reached: dict[fx.Node, tuple[Dims, float]] = {softmax.result: (forward.held[softmax.of], 1.0)}
    queries: Result | None = None
    keys: Result | None = None
    query_source = key_source = None
    biases: list[BiasGradient] = []
    order, unused = [softmax.result], list[fx.Node]()
    gain, gain_gradient, multiplied = forward.scores.gain, None, set[fx.Node]()
    for node in order:
        dims, factor = reached[node]
        before_gain = gain is not None and node not in multiplied
        foreign, known_biases = list[fx.Node](), len(biases)
        for user in node.users:
            if _ignores(user, node):
                unused += holders(user)[0]
                continue
            step = _followed(user, node, dims, factor, conditions)
            if step is None and gain is not None and before_gain and _multiplies(user, node, gain, dims):
                step = dims, factor
                multiplied.add(user)
            if step is not None:
                reached[user] = step
                order.append(user)
                multiplied |= {user} if node in multiplied else set()
                continue
            if gain is not None and before_gain and gain_gradient is None and _is_weighted(user, node, gain, dims):
                gain_gradient = _bias_gradient(user, dims, factor / gain.factor_after, forward.dtype)
                continue
            if not before_gain and factors(user) is not None:
                found = _read_operand_gradient(forward, user, node, dims, factor)
                if isinstance(found, Reject):
                    return found
                if found is not None:
                    is_queries, result, link = found
                    if (queries if is_queries else keys) is not None:
                        return Reject(f"{g.describe(user)} uses the gradient of the scores a second time", user, "illegal")
                    if is_queries:
                        queries, query_source = result, link
                    else:
                        keys, key_source = result, link
                    continue
            summed = _summed(user, dims)
            if summed is not None:
                biases.append(_bias_gradient(user, summed, factor, forward.dtype))
            else:
                foreign.append(user)
        if node in multiplied and (foreign or len(biases) > known_biases):
            reason = f"the gradient of the multiplied scores at {node.name} is used otherwise than for queries and keys"
            return Reject(reason, node, "illegal")
        if foreign:
            biases.append(BiasGradient(Result(node, dims, factor)))
    if gain_gradient is not None and gain_gradient.axes & set(forward.columns):
        return Reject(f"{g.describe(gain_gradient.result.node)} is no gradient of what multiplies the scores", gain_gradient.result.node)
    outputs = {b.result.node for b in (*biases, *([gain_gradient] if gain_gradient is not None else ()))}
    needed += [n for n in (*order, *unused) if n not in outputs]
    return Backward(grad, queries, keys, values, tuple(biases), query_source, key_source, tuple(needed), gain=gain_gradient)


def _multiplies(user: fx.Node, node: fx.Node, gain: Gain, dims: Dims) -> bool:
    """Whether ``user`` is ``node``, the gradient of the multiplied scores, times ``gain``."""
    other = _other_factor(user, node)
    if other is None or not _has_shape_of(user, node):
        return False
    known, wanted = _dims_of(other, gain.tensor, gain.dims), broadcast(dims, other)
    return known is not None and wanted is not None and _are_alike(known, wanted)


def _is_weighted(user: fx.Node, node: fx.Node, gain: Gain, dims: Dims) -> bool:
    """Whether ``user`` is ``node``, the gradient of the multiplied scores, times the scores before."""
    other = _other_factor(user, node)
    known = None if other is None else _dims_of(other, gain.of, gain.of_dims)
    return known is not None and _are_alike(known, dims)


def _dims_of(node: Any, source: fx.Node, dims: Dims) -> Dims | None:
    """The dims of ``node`` if it holds the values of ``source``, by views and casts."""
    path: list[fx.Node] = []
    while node is not source:
        if not (is_view(node) or is_cast(node)):
            return None
        path.append(node)
        node = node.args[0]
    known: Dims | None = dims
    for step in reversed(path):
        known = None if known is None else after(step, known)
    return known


def _other_factor(user: fx.Node, node: fx.Node) -> fx.Node | None:
    if user.target is not aten.mul.Tensor or len(user.args) != 2 or user.kwargs:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    return other if isinstance(other, fx.Node) and other is not node else None


def _ignores(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` needs the sizes of ``node`` alone, as what autograd makes of an operation in place on a view does."""
    if user.target is aten.new_empty_strided.default:
        return all(u.target is aten.copy.default and u.args[0] is user for u in user.users)
    return user.target is aten.copy.default and user.args[0] is node and user.args[1] is not node


def _followed(user: fx.Node, node: fx.Node, dims: Dims, factor: float, conditions: set[tuple[Any, bool]]) -> tuple[Dims, float] | None:
    """(dims, factor) of ``user`` if it holds the gradient of the scores too."""
    scaled = scaling(user)
    if scaled is not None and scaled[0] is node:
        return dims, factor * scaled[1]
    if (is_view(user) or is_cast(user)) and user.args[0] is node:
        found = after(user, dims)
        return None if found is None else (found, factor)
    if user.target is aten.add.Tensor and len(user.args) == 2 and not user.kwargs and _has_shape_of(user, node):
        other = user.args[1] if user.args[0] is node else user.args[0]
        return (dims, factor) if uniform(other) == 0.0 else None
    if user.target is aten.copy.default and user.args[1] is node and g.difference(g.value(user), g.value(node)) is None:
        return dims, factor
    if user.target is aten.where.self:
        hides = user.args[1] is not node
        kept, other = (user.args[2], user.args[1]) if hides else (user.args[1], user.args[2])
        known = (user.args[0], hides) in conditions or (not hides and holds_everywhere(user.args[0]))
        if known and kept is node and uniform(other) == 0.0 and _has_shape_of(user, node):
            return dims, factor
    return None


def _has_shape_of(user: fx.Node, node: fx.Node) -> bool:
    return g.same_sizes(g.value(user).shape, g.value(node).shape)


def _read_operand_gradient(
    forward: Forward, product: fx.Node, node: fx.Node, dims: Dims, factor: float
) -> tuple[bool, Result, Link] | Reject | None:
    """(whether it is that of the queries, the gradient, of what) if ``product`` multiplies the scores' gradient by keys or queries."""
    is_first = product.args[0] is node
    other: Any = product.args[1] if is_first else product.args[0]
    if other is node:
        return None
    summed, kept = (dims[-1], dims[-2]) if is_first else (dims[-2], dims[-1])
    for is_queries, of, by, axes in (
        (True, forward.queries, forward.keys, forward.columns),
        (False, forward.keys, forward.queries, forward.rows),
    ):
        known = by.dims_of(other, forward.dtype)
        if known is None or leaves(summed) != axes:
            continue
        inner, outer = (known[-2], known[-1]) if is_first else (known[-1], known[-2])
        same_batch = [leaves(d) for d in known[:-2]] == [leaves(d) for d in dims[:-2]]
        if leaves(inner) != axes or leaves(outer) != forward.depth or not same_batch:
            continue
        result = (*dims[:-2], kept, outer) if is_first else (*dims[:-2], outer, kept)
        return _with_source(forward, is_queries, of, product, result, factor)
    return None


def _with_source(
    forward: Forward, is_queries: bool, of: Operand, product: fx.Node, dims: Dims, factor: float
) -> tuple[bool, Result, Link] | Reject:
    """The gradient of what the kernel may read in place of ``of``, so deep that scalings and casts go too, or of ``of`` itself."""
    failure = None
    for link in of.sources(forward.dtype, scaled=True):
        end = end_of(product, dims, forward.scores.scale * link.factor / factor, forward.dtype)
        if isinstance(end, Result) and (end.factor == 1.0 or link.is_same or g.value(end.node).dtype == torch.float32):
            return is_queries, end, link
        failure = failure or (end if isinstance(end, Reject) else None)
    return failure or Reject(f"{forward.dtype} operands of a product in {g.value(product).dtype}", product)


def _summed(user: fx.Node, dims: Dims) -> Dims | None:
    """The dims of ``user`` if it sums over dims of what has ``dims``."""
    if user.target is not aten.sum.dim_IntList:
        return None
    given = g.arguments(user)
    gone = {d % len(dims) for d in given["dim"] or range(len(dims))}
    if given["keepdim"]:
        return tuple(() if d in gone else dim for d, dim in enumerate(dims))
    return tuple(dim for d, dim in enumerate(dims) if d not in gone)


def _bias_gradient(node: fx.Node, dims: Dims, factor: float, dtype: torch.dtype) -> BiasGradient:
    """The gradient of a bias that is ``factor`` times ``node``, or a sum of it over dims that the bias was expanded along, or what is left
    of them in ``dtype`` where nothing else is used."""
    passed: list[fx.Node] = []
    while len(node.users) == 1:
        user = next(iter(node.users))
        summed = _summed(user, dims)
        moved = after(user, dims) if (is_view(user) or is_cast(user)) and summed is None else summed
        if moved is None:
            break
        narrows = is_cast(user) and g.value(user).dtype == dtype
        if summed is None and not narrows and not any(_summed(u, moved) for u in user.users):
            break
        passed.append(node)
        node, dims = user, moved
    return BiasGradient(Result(node, dims, factor, tuple(passed)))
