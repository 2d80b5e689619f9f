"""When a node of a pattern and a node of a graph compute the same, and what is known of a single node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.declarative.examples import is_number
from fusebackend.declarative.precision import same_number

aten = torch.ops.aten

#: Operators whose result does not depend on the order of their first two arguments.
COMMUTATIVE = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
    }
)
#: Views that can be moved from the result of a pointwise operator to its operands.
MOVABLE_VIEWS = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim}
)
_EQUIVALENT = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.detach.default: aten.alias.default,
}
# Where a slice ends that has no end.
_NO_END = 2**63 - 1
# A number as the other operand: one computation under two names. The first has the arguments that are compared.
_OF_NUMBERS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in "add sub mul div bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge remainder fmod".split()
}
_EQUIVALENT.update(_OF_NUMBERS)
# Eager computes these powers by the other operator, to the bit.
_POWERS = {2: aten.mul.Tensor, -0.5: aten.rsqrt.default, 0.5: aten.sqrt.default, -1: aten.reciprocal.default}


def same_target(a: Any, b: Any) -> bool:
    """Whether two operators are the same, or differ only in what they require of their input's strides or of autograd, or in whether
    a number is given as such."""
    return _EQUIVALENT.get(a, a) is _EQUIVALENT.get(b, b)


def equivalent_targets(target: Any) -> set[Any]:
    """All operators that are the same as ``target`` to :func:`same_target`."""
    return {t for t in (target, *_EQUIVALENT, *_EQUIVALENT.values()) if same_target(t, target)}


def is_alias(node: Any) -> bool:
    """Whether ``node`` is its operand: ``detach``, or a slice of all, which ``x[:, i]`` has for its first dim."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.slice.Tensor:
        given = g.arguments(node)
        return given["start"] in (None, 0) and given["end"] in (None, _NO_END) and given["step"] == 1
    return node.target in (aten.alias.default, aten.detach.default)


def as_power_of(base: Any, expected: fx.Node, node: fx.Node) -> bool:
    """Whether one of the two nodes is a power of a fixed exponent and the other its operator: ``pow(x, 2)`` and ``x * x``."""
    other = node if base is expected else expected
    return (
        other.target is not base.target
        and base.target is aten.pow.Tensor_Scalar
        and _POWERS.get(base.args[1]) is other.target
        and (other.target is not aten.mul.Tensor or other.args[0] is other.args[1])
    )


def computes_again(node: Any, other: fx.Node, depth: int = 3) -> list[fx.Node] | None:
    """The nodes by which ``node`` computes from the same operands what ``other`` does, as ``x - mean`` that a program spells twice; None if
    it does not."""
    if node is other:
        return []
    if not isinstance(node, fx.Node) or depth == 0 or node.op != "call_function" or node.target is not other.target:
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or g.is_mutating(node) or len(node.args) != len(other.args):
        return None
    found = [node]
    for a, b in zip((*node.args, node.kwargs), (*other.args, other.kwargs)):
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            inner = computes_again(a, b, depth - 1)
            if inner is None:
                return None
            found += inner
        elif isinstance(a, torch.SymInt) or type(a) is not type(b) or a != b or repr(a) != repr(b):  # 0.0 and -0.0 are equal
            return None
    return found


def has_value_of(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes have one value: one is a copy of the other, or both compute it, and nothing is written in between."""
    if computes_again(a, b) is None and not is_copy_of(a, b):
        return False
    return g.mutation_between(*sorted((a, b))) is None


def nodes_of_same_value(node: fx.Node) -> set[fx.Node]:
    """``node``, and the nodes beside it that compute it once more."""
    beside = {u for n in node.all_input_nodes[:1] for u in n.users if u.target is node.target}
    return {node} | {u for u in beside if has_value_of(u, node)}


def is_copy_of(a: fx.Node, b: fx.Node) -> bool:
    """Whether one of two nodes is a copy of the other, in whatever memory order."""
    return any(copy.target is aten.clone.default and copy.args[0] is source for copy, source in ((a, b), (b, a)))


def same_constant(name: str, expected: Any, actual: Any, pattern_node: fx.Node, node: fx.Node) -> bool:
    """Whether the argument ``name`` of two calls has the same value, which is not a node."""
    if name in ("device", "pin_memory"):
        return True  # the device of the replacement's output is compared with that of the original
    if name in ("dim", "dims") and isinstance(expected, int) and isinstance(actual, int):
        added = pattern_node.target is aten.unsqueeze.default  # it counts the dims of its result
        ranks = [g.value(n.all_input_nodes[0]).dim() + added for n in (pattern_node, node)]
        return expected % max(ranks[0], 1) == actual % max(ranks[1], 1)
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if is_number(expected) and is_number(actual):
        return computes_alike(node, expected, actual) and same_number(expected, actual, getattr(g.value(node), "dtype", None))
    # Values of other types are not compared: comparing a symbolic size would add a guard.
    return type(expected) is type(actual) and expected == actual


def computes_alike(node: fx.Node, a: Any, b: Any) -> bool:
    """Whether a comparison at ``node`` is made in one dtype with either of two operands, numbers or tensors: its result does not tell."""
    if getattr(g.value(node), "dtype", None) is not torch.bool:
        return True
    values = [g.value(v) if isinstance(v, fx.Node) else v for v in (a, b)]
    others = [g.value(n) for n in node.all_input_nodes if n not in (a, b) and g.is_tensor(n)]
    return all(torch.result_type(other, values[0]) == torch.result_type(other, values[1]) for other in others)


def is_pointwise_of_one_shape(node: fx.Node) -> bool:
    """Whether ``node`` is pointwise without broadcasting, so that a view of its result is the same operator on views of its operands."""
    if torch.Tag.pointwise not in node.target.tags:
        return False
    shape = g.value(node).shape
    tensors = [g.value(n) for n in node.all_input_nodes if g.is_tensor(n)]
    return all(g.same_sizes(t.shape, shape) for t in tensors)


def is_plain_sum(node: Any) -> bool:
    """Whether ``node`` is ``a + b`` of two tensors that have the shape, dtype and strides of the result."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or g.arguments(node)["alpha"] != 1:
        return False
    return all(g.is_tensor(t) and g.difference(g.value(t), g.value(node)) is None for t in node.args[:2])


def sum_terms(node: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """The terms of a sum whose partial sums have no other users, and its additions."""
    if not is_plain_sum(node) or len(node.users) > 1:
        return [node], []
    (left, left_sums), (right, right_sums) = (sum_terms(n) for n in node.args[:2])
    return [*left, *right], [node, *left_sums, *right_sums]


def ancestors(node: fx.Node) -> set[fx.Node]:
    """All nodes that ``node`` depends on."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return seen
