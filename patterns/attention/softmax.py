"""Reads a softmax out of a graph, as the decompositions and users write it, and its gradient."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import is_cast, is_view
from fusebackend.patterns.attention.numbers import uniform

aten, prims = torch.ops.aten, torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Softmax:
    """``softmax(scores, dim)``.

    Attributes:
        result: the probabilities.
        dim: counted from the first.
        is_safe: whether rows that are -inf everywhere become 0, as in scaled_dot_product_attention; NaN if not.
        nodes: all that compute it, with ``result``, without ``scores``.
        is_shifted: whether the maximum is subtracted. If not, the weights of rows of low numbers are 0 / 0.
    """

    scores: fx.Node
    result: fx.Node
    dim: int
    is_safe: bool
    nodes: tuple[fx.Node, ...]
    is_shifted: bool = True


def read_softmax(exp: fx.Node) -> Softmax | None:
    """The softmax whose exponential ``exp`` is."""
    if g.value(exp).dim() < 2:
        return None
    if exp.target is aten._softmax.default:
        scores: Any = exp.args[0]
        return Softmax(scores, exp, exp.args[1] % g.value(scores).dim(), False, (exp,))  # type: ignore[operator]
    division = next((u for u in exp.users if u.target is aten.div.Tensor and u.args[0] is exp and _is_sum_of(u.args[1], exp)), None)
    if division is None:
        return None
    total: Any = division.args[1]
    rank = g.value(exp).dim()
    dim = total.args[1][0] % rank
    scores, maximum = _without_maximum(exp.args[0], dim)
    nodes = [*maximum, exp, total, division]
    safe = _read_safe(division, scores, dim)
    if safe is not None:
        return Softmax(scores, safe[-1], dim, True, (*nodes, *safe), bool(maximum))
    return Softmax(scores, division, dim, False, tuple(nodes), bool(maximum))


def _is_sum_of(node: Any, x: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.sum.dim_IntList or node.args[0] is not x:
        return False
    arguments = g.arguments(node)
    return len(arguments["dim"] or ()) == 1 and arguments["keepdim"] and g.value(node).dtype == g.value(x).dtype


def _without_maximum(shifted: Any, dim: int) -> tuple[fx.Node, list[fx.Node]]:
    """(scores, nodes) if ``shifted`` is ``scores - max(scores)``; itself if nothing is subtracted."""
    if isinstance(shifted, fx.Node) and shifted.target is aten.sub.Tensor and len(shifted.args) == 2 and not shifted.kwargs:
        scores, maximum = shifted.args
        path: list[fx.Node] = []
        while isinstance(maximum, fx.Node) and maximum.target in (aten.alias.default, aten.detach.default):
            path.append(maximum)
            maximum = maximum.args[0]
        if isinstance(maximum, fx.Node) and maximum.target is operator.getitem and maximum.args[1] == 0:
            path.append(maximum)
            maximum = maximum.args[0]
        if isinstance(scores, fx.Node) and isinstance(maximum, fx.Node) and _is_maximum(maximum, scores, dim):
            return scores, [maximum, *path, shifted]
    return shifted, []


def _is_maximum(node: fx.Node, scores: fx.Node, dim: int) -> bool:
    if node.args[:1] != (scores,) or node.target not in (aten.amax.default, aten.max.dim):
        return False
    arguments = g.arguments(node)
    dims = arguments["dim"] if isinstance(arguments["dim"], (list, tuple)) else [arguments["dim"]]
    return [d % g.value(scores).dim() for d in dims] == [dim] and arguments["keepdim"]


def _read_safe(division: fx.Node, scores: fx.Node, dim: int) -> list[fx.Node] | None:
    """``where(not any(scores != -inf), 0, division)``."""
    for where in division.users:
        if where.target is not aten.where.self or where.args[2] is not division or uniform(where.args[1]) != 0.0:
            continue
        nothing: Any = where.args[0]
        if nothing.target is not aten.logical_not.default:
            continue
        some = nothing.args[0]
        if some.target is not aten.any.dim or some.args[1] % g.value(scores).dim() != dim or not g.arguments(some)["keepdim"]:
            continue
        finite = some.args[0]
        if finite.target is not aten.logical_not.default:
            continue
        hidden = finite.args[0]
        if hidden.target is aten.eq.Scalar and hidden.args[0] is scores and hidden.args[1] == -math.inf:
            return [hidden, finite, some, nothing, where]
    return None


@dataclasses.dataclass(frozen=True)
class SoftmaxGradient:
    """The gradient of the scores: ``p * (grad - sum(p * grad))``.

    Attributes:
        grad: the gradient of the probabilities, before casts.
        of: the node of the probabilities from which the result takes its dims.
        nodes: all that compute it, with ``result``.
    """

    grad: fx.Node
    of: fx.Node
    result: fx.Node
    nodes: tuple[fx.Node, ...]


def read_softmax_gradient(probabilities: set[fx.Node]) -> SoftmaxGradient | None:
    """The gradient that is computed from nodes that hold the probabilities."""
    for p in sorted(probabilities):
        for user in p.users:
            if user.target is aten._softmax_backward_data.default and user.args[1] is p:
                return SoftmaxGradient(user.args[0], p, user, (user,))  # type: ignore[arg-type]
            if user.target is aten.mul.Tensor and len(user.args) == 2:
                grad: Any = user.args[0] if user.args[1] is p else user.args[1]
                found = _read_written_out(user, grad, p, probabilities)
                if found is not None:
                    return found
    return None


def _read_written_out(weighted: fx.Node, grad: Any, p: fx.Node, probabilities: set[fx.Node]) -> SoftmaxGradient | None:
    total = next((u for u in weighted.users if _is_sum_of(u, weighted)), None)
    if total is None or not isinstance(grad, fx.Node) or grad in probabilities:
        return None
    for user in total.users:
        if user.target is prims.fma.default and user.args[1] is total and user.args[2] is weighted:
            negative: Any = user.args[0]
            if negative.target is aten.neg.default and negative.args[0] in probabilities:
                return SoftmaxGradient(grad, p, user, (weighted, total, negative, user))
        if user.target is aten.mul.Tensor and any(a in probabilities for a in user.args):
            last = next((u for u in user.users if u.target is aten.sub.Tensor and u.args == (weighted, user)), None)
            if last is not None:
                return SoftmaxGradient(grad, p, last, (weighted, total, user, last))
    return None


def holders(result: fx.Node) -> tuple[list[fx.Node], list[tuple[fx.Node, fx.Node]]]:
    """The nodes that hold the values of ``result``, by views and casts, and (holder, user) for each other user of theirs."""
    held, others = [result], list[tuple[fx.Node, fx.Node]]()
    for node in held:
        for user in node.users:
            if (is_view(user) or is_cast(user)) and user.args[0] is node:
                held.append(user)
            else:
                others.append((node, user))
    return held, others
