"""Finds a traced graph inside another: the matching behind patterns that are given as ordinary PyTorch.

Every argument of every node must be accounted for: it is a node of the pattern, an input, a named scalar, a size that
follows from the inputs' sizes, or the same constant; so nothing is dropped. Commutative operators match in either order
(with backtracking), and views between pointwise operators are seen through by moving them to the inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fusebackend import fx_utils as g
from fusebackend.declarative.trace import Trace
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

_COMMUTATIVE = frozenset(
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
_SAME = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default, aten.detach.default: aten.alias.default}
_MOVABLE_VIEWS = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim}
)
_MOST_STEPS = 20_000  # a pattern that is ambiguous beyond reason is given up, not searched for minutes


@dataclasses.dataclass(frozen=True)
class Bound:
    """What an input stands for: a node of the searched graph, seen through ``views`` (innermost first)."""

    node: fx.Node
    views: tuple[fx.Node, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return g.value(self.views[-1] if self.views else self.node).shape


@dataclasses.dataclass(frozen=True)
class State:
    """A partial assignment. Immutable, so that giving up a choice needs no undoing."""

    nodes: Mapping[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]] = dataclasses.field(default_factory=dict)
    inputs: Mapping[fx.Node, Bound] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: tuple[tuple[Any, Any, fx.Node], ...] = ()
    rest: tuple[fx.Node, ...] = ()  # terms of the anchor's sum that are not the pattern's
    sums: tuple[fx.Node, ...] = ()  # additions between the anchor and its terms


@dataclasses.dataclass(frozen=True)
class Found:
    """A complete match, before its sizes and dtypes are checked.

    Attributes:
        state: the assignment.
        env: the size that each symbol of the pattern stands for.
    """

    state: State
    env: Mapping[Any, Any]

    def size(self, expression: Any) -> Any:
        """A size of the pattern (int or SymInt) as a size of the searched graph."""
        return evaluate(expression, self.env)


class Search:
    """Looks for one trace.

    Args:
        pattern: what to look for.
        scalars: the constants in it that stand for any number, by value, with the name of each.
    """

    def __init__(self, pattern: Trace, scalars: Mapping[Any, str]):
        self.pattern = pattern
        self.scalars = scalars
        self.outputs = [o for o in dict.fromkeys(pattern.outputs) if o is not None]
        self.operators = [n for n in pattern.graph.nodes if n.op == "call_function" and g.is_tensor(n)]
        # The output that reaches most of the pattern, so that the others are found near what is already assigned.
        self.anchor = max(self.outputs, key=lambda o: len(_ancestors(o)))

    def find(self, node: fx.Node) -> Found | Reject | None:
        """Matches with the anchor at ``node``. A Reject if more than half of the pattern was there, None if less."""
        self._steps = 0
        self._deepest: tuple[int, Reject | None] = (0, None)
        for state in self._outputs(self.outputs, node):
            answer = self._check(state)
            if isinstance(answer, Found):
                return answer
            if self._deepest[0] <= len(self.operators):  # complete but for this: of several, the first says it best
                self._deepest = (len(self.operators) + 1, answer)
        depth, reject = self._deepest
        return reject if reject is not None and 2 * depth >= len(self.operators) else None

    def _outputs(self, remaining: list[fx.Node], node: fx.Node) -> Iterator[State]:
        others = [o for o in remaining if o is not self.anchor]
        for state in self._anchor(node):
            yield from self._other_outputs(others, state)

    def _anchor(self, node: fx.Node) -> Iterator[State]:
        yield from self._node(self.anchor, node, (), State())
        # Autograd adds up the gradients of a tensor in the order in which they come, so the two terms of a pattern's
        # gradient may stand apart in a longer sum (a residual connection): (rest + a) + b for rest + (a + b).
        gradient = self.anchor in self.pattern.outputs[self.pattern.forward_outputs :]
        if not (gradient and _is_plain_sum(self.anchor) and _is_plain_sum(node)):
            return
        (left, left_sums), (right, right_sums) = (_terms(n) for n in node.args[:2])
        if len(left) + len(right) == 2:
            return
        for x, y in itertools.product(left, right):
            for a, b in (self.anchor.args[:2], self.anchor.args[1::-1]):
                if same_target(a.target, x.target) and same_target(b.target, y.target):
                    for first in self._node(a, x, (), State()):
                        for state in self._node(b, y, (), first):
                            rest = tuple(t for t in (*left, *right) if t is not x and t is not y)
                            nodes = {**state.nodes, self.anchor: (node, ())}
                            yield dataclasses.replace(state, nodes=nodes, rest=rest, sums=(*left_sums, *right_sums))

    def _other_outputs(self, remaining: list[fx.Node], state: State) -> Iterator[State]:
        if not remaining:
            yield state
            return
        output, rest = remaining[0], remaining[1:]
        if output in state.nodes or output in state.inputs:
            yield from self._other_outputs(rest, state)
            return
        candidates = [n for n in _near(output, state) if n.op == "call_function" and same_target(output.target, n.target)]
        if not candidates:
            self._fail(state, f"no {g.describe(output)} for another output of the pattern", next(iter(state.nodes.values()))[0])
        for candidate in candidates:
            for found in self._node(output, candidate, (), state):
                yield from self._other_outputs(rest, found)

    def _fail(self, state: State, reason: str, node: Any) -> None:
        if len(state.nodes) > self._deepest[0] or self._deepest[1] is None:
            self._deepest = (len(state.nodes), Reject(reason, node if isinstance(node, fx.Node) else None))

    def _node(self, p: fx.Node, node: Any, views: tuple[fx.Node, ...], state: State) -> Iterator[State]:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            self._fail(state, "too many ways to match; given up", node)
            return
        if p.op == "placeholder":
            bound = Bound(node, views) if g.is_tensor(node) else None
            if bound is None or state.inputs.get(p, bound) != bound:
                self._fail(state, f"{p.name} stands for two different tensors" if bound else "a number where a tensor is expected", node)
            else:
                yield dataclasses.replace(state, inputs={**state.inputs, p: bound})
            return
        if p in state.nodes:
            if state.nodes[p] == (node, views):
                yield state
            else:
                self._fail(state, f"another {g.describe(p)} than elsewhere in the pattern", node)
            return
        if p.target is aten.alias.default and not (isinstance(node, fx.Node) and node.target is aten.alias.default):
            yield from self._node(p.args[0], node, views, state)
            return
        if not isinstance(node, fx.Node) or node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            found = g.describe(node) if isinstance(node, fx.Node) else repr(node)
            self._fail(state, f"expected {g.describe(p)}, found {found}", node)
            return
        if not same_target(p.target, node.target):
            if node.target in (aten.alias.default, aten.detach.default):
                yield from self._node(p, node.args[0], views, state)
            elif node.target in _MOVABLE_VIEWS and torch.Tag.pointwise in p.target.tags:
                yield from self._node(p, node.args[0], (node, *views), state)
            else:
                self._fail(state, f"expected {g.describe(p)}, found {g.describe(node)}", node)
            return
        if views and not _pointwise_of_one_shape(node):
            self._fail(state, f"{g.describe(views[0])} between the operators can't be moved before {g.describe(node)}", node)
            return
        state = dataclasses.replace(state, nodes={**state.nodes, p: (node, views)})
        mine, theirs = g.arguments(p), g.arguments(node)
        orders = [list(zip(mine.items(), theirs.values()))]
        if p.target in _COMMUTATIVE and theirs.get("alpha", 1) == 1:
            swapped = {**theirs, "self": theirs["other"], "other": theirs["self"]}
            orders.append(list(zip(mine.items(), swapped.values())))
        for pairs in orders:
            yield from self._arguments(pairs, p, node, views, state)

    def _arguments(self, pairs: list, p: fx.Node, node: fx.Node, views: tuple, state: State) -> Iterator[State]:
        if not pairs:
            yield state
            return
        ((name, mine), theirs), rest = pairs[0], pairs[1:]
        for found in self._argument(name, mine, theirs, p, node, views, state):
            yield from self._arguments(rest, p, node, views, found)

    def _argument(self, name: str, mine: Any, theirs: Any, p: fx.Node, node: fx.Node, views: tuple, state: State) -> Iterator[State]:
        if isinstance(mine, fx.Node) and g.is_tensor(mine):
            yield from self._node(mine, theirs, views, state)
        elif isinstance(mine, (list, tuple)):
            if not isinstance(theirs, (list, tuple)) or len(mine) != len(theirs):
                self._fail(state, f"{g.describe(node)}: {name} is {theirs}, the pattern has {mine}", node)
                return
            states = [state]
            for a, b in zip(mine, theirs):
                states = [new for old in states for new in self._argument(name, a, b, p, node, views, old)]
            yield from states
        elif isinstance(mine, fx.Node) or (isinstance(theirs, fx.Node) and isinstance(mine, int)):
            yield dataclasses.replace(state, sizes=(*state.sizes, (mine, theirs, node)))
        elif isinstance(mine, (int, float)) and not isinstance(mine, bool) and mine in self.scalars:
            scalar = self.scalars[mine]
            if isinstance(theirs, (int, float)) and state.scalars.get(scalar, theirs) == theirs:
                yield dataclasses.replace(state, scalars={**state.scalars, scalar: theirs})
            else:
                self._fail(state, f"{g.describe(node)}: {name} is not one number that {scalar!r} could stand for", node)
        elif _same_constant(name, mine, theirs, p, node):
            yield state
        else:
            self._fail(state, f"{g.describe(node)}: {name} is {_spell(theirs)}, the pattern has {_spell(mine)}", node)

    def _check(self, state: State) -> Found | Reject:
        """Dtypes, ranks and sizes of a structurally complete match."""
        env: dict[Any, Any] = {}
        for p, bound in state.inputs.items():
            mine, theirs = g.value(p), g.value(bound.node)
            if mine.dtype != theirs.dtype:
                return Reject(f"wrong dtype: {theirs.dtype} where the pattern was registered with {mine.dtype}", bound.node)
            if mine.dim() != len(bound.shape):
                return Reject(f"wrong rank: {len(bound.shape)} where the pattern was registered with {mine.dim()}", bound.node)
            for expected, actual in zip(mine.shape, bound.shape):
                symbol = expected.node.expr if isinstance(expected, torch.SymInt) else None
                if symbol is not None and symbol.is_symbol and symbol not in env:
                    env[symbol] = actual
        sizes = [(e, a, b.node) for p, b in state.inputs.items() for e, a in zip(g.value(p).shape, b.shape)]
        sizes += [(g.value(m) if isinstance(m, fx.Node) else m, g.value(t) if isinstance(t, fx.Node) else t, n) for m, t, n in state.sizes]
        for expected, actual, node in sizes:
            wanted = evaluate(expected, env)
            if wanted is None or isinstance(actual, torch.Tensor) or not g.same_size(wanted, actual):
                return Reject(f"a size is {actual} where the pattern's other sizes make it {wanted} (a broadcast?)", node)
        return Found(state, env)


def _is_plain_sum(node: Any) -> bool:
    """An addition of two tensors of the result's shape and dtype."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or g.arguments(node)["alpha"] != 1:
        return False
    return all(g.is_tensor(t) and g.difference(g.value(t), g.value(node)) is None for t in node.args[:2])


def _terms(node: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """The terms of a sum whose partial results nobody else uses, and the additions."""
    if not _is_plain_sum(node) or len(node.users) > 1:
        return [node], []
    (left, a), (right, b) = (_terms(n) for n in node.args[:2])
    return [*left, *right], [node, *a, *b]


def evaluate(expression: Any, env: Mapping[Any, Any]) -> Any:
    """A size given in the pattern's symbols, in terms of ``env``; None if a symbol is not in it."""
    if not isinstance(expression, torch.SymInt):
        return expression
    symbolic = expression.node.expr
    if not symbolic.free_symbols <= env.keys():
        return None
    return sympy_interp(PythonReferenceAnalysis, dict(env), symbolic)


def same_target(a: Any, b: Any) -> bool:
    return _SAME.get(a, a) is _SAME.get(b, b)


def _pointwise_of_one_shape(node: fx.Node) -> bool:
    """Whether a view of the result is the result of the views of the operands."""
    if torch.Tag.pointwise not in node.target.tags:
        return False
    shape = g.value(node).shape
    tensors = [g.value(n) for n in node.all_input_nodes if g.is_tensor(n)]
    return all(len(t.shape) == len(shape) and all(map(g.same_size, t.shape, shape)) for t in tensors)


def _same_constant(name: str, mine: Any, theirs: Any, p: fx.Node, node: fx.Node) -> bool:
    if name in ("device", "pin_memory"):
        return True  # the replacement's output must be on the original's device anyhow
    if name in ("dim", "dims") and isinstance(mine, int) and isinstance(theirs, int):
        ranks = [g.value(n.all_input_nodes[0]).dim() for n in (p, node)]
        return mine % max(ranks[0], 1) == theirs % max(ranks[1], 1)
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return mine is theirs
    return type(mine) is type(theirs) and mine == theirs or (_is_number(mine) and _is_number(theirs) and mine == theirs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _spell(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


def _near(output: fx.Node, state: State) -> list[fx.Node]:
    """The nodes that are as far downstream of something assigned as ``output`` is in the pattern."""
    level, steps = [output], 0
    while level:
        level = list(dict.fromkeys(i for n in level for i in n.all_input_nodes))
        steps += 1
        images = [state.nodes[n][0] for n in level if n in state.nodes]
        images += [b.node for n in level if n in state.inputs for b in [state.inputs[n]]]
        if images:
            found = set(images)
            for _ in range(steps):
                found = {u for n in found for u in n.users}
            return sorted(found)
    return []


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen, stack = set(), [node]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return seen
