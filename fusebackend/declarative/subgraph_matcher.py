"""Finds a traced pattern as a subgraph of another graph.

Every argument of every matched node is compared: it must correspond to a node of the pattern, an input, a named number, a
size that follows from the inputs' sizes, or an equal constant. Commutative operators match in either order, by backtracking.
A view between pointwise operators does not prevent a match: the replacement applies it to the inputs instead.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.declarative import sizes
from fusebackend.declarative.examples import is_number
from fusebackend.declarative.node_comparison import (
    COMMUTATIVE,
    MOVABLE_VIEWS,
    ancestors,
    is_plain_sum,
    is_pointwise_of_one_shape,
    same_constant,
    same_target,
    sum_terms,
)
from fusebackend.declarative.trace import Trace
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

_MAX_STEPS = 20_000  # bounds the backtracking of ambiguous patterns, which could take minutes

_Views = tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class InputBinding:
    """What an input of the pattern stands for: ``node`` of the searched graph, with ``views`` applied to it in this order."""

    node: fx.Node
    views: _Views = ()

    @property
    def shape(self) -> torch.Size:
        return g.value(self.views[-1] if self.views else self.node).shape


@dataclasses.dataclass(frozen=True)
class SubgraphMatch:
    """A complete match.

    Attributes:
        nodes: the node of the searched graph for each operator of the pattern.
        inputs: what each input of the pattern stands for.
        scalars: the value of each named number.
        views: the views between the matched nodes, which the replacement applies to the inputs.
        other_terms: terms of the sum at the anchor that are not the pattern's.
        sums: the additions between the anchor and its terms.
    """

    nodes: Mapping[fx.Node, fx.Node]
    inputs: Mapping[fx.Node, InputBinding]
    scalars: Mapping[str, Any]
    views: frozenset[fx.Node]
    other_terms: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class _PartialMatch:
    """The assignments made so far. It is immutable, so backtracking needs no undo.

    Attributes:
        nodes: the node of the searched graph for each operator of the pattern, and the views that its result passes through.
        sizes: pairs of sizes that must be equal, the pattern's first, each with the node that has the second.
        others: see :class:`SubgraphMatch`.
    """

    nodes: Mapping[fx.Node, tuple[fx.Node, _Views]] = dataclasses.field(default_factory=dict)
    inputs: Mapping[fx.Node, InputBinding] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: tuple[tuple[Any, Any, fx.Node], ...] = ()
    other_terms: tuple[fx.Node, ...] = ()
    sums: tuple[fx.Node, ...] = ()


class SubgraphMatcher:
    """Looks for one trace in other graphs.

    Args:
        pattern: the trace to look for.
        scalars: the constants in it that match any number, with the name of each.

    Attributes:
        outputs: what the pattern computes and returns, without repetitions. An input that it returns (a gradient that is passed on)
            is not among them: it stays what it is.
        anchor: the output that depends on most of the pattern, where matching starts.
    """

    def __init__(self, pattern: Trace, scalars: Mapping[Any, str]):
        self.pattern = pattern
        self.scalars = scalars
        self.outputs = [o for o in dict.fromkeys(pattern.outputs) if o is not None and o.op != "placeholder"]
        self.anchor = max(self.outputs, key=lambda o: len(ancestors(o)))
        self._operators = len([n for n in pattern.graph.nodes if n.op == "call_function" and g.is_tensor(n)])

    def find(self, node: fx.Node) -> SubgraphMatch | Reject | None:
        """Matches the pattern with its anchor at ``node``.

        Returns:
            The match; a Reject if at least half of the pattern's operators were found; None otherwise.
        """
        return copy.copy(self)._find(node)  # threads may compile at once, and a search counts its steps

    def _find(self, node: fx.Node) -> SubgraphMatch | Reject | None:
        self._steps = 0
        # How many operators the best incomplete match has, and what prevented it from being complete.
        self._deepest: tuple[int, Reject | None] = (0, None)
        for found in self._match_all(node):
            problem = self._mismatch(found)
            if problem is None:
                nodes = {p: image for p, (image, _) in found.nodes.items()}
                views = frozenset(v for _, views in found.nodes.values() for v in views)
                return SubgraphMatch(nodes, found.inputs, found.scalars, views, found.other_terms, found.sums)
            if self._deepest[0] <= self._operators:  # of several complete structures, the first gives the reason
                self._deepest = (self._operators + 1, problem)
        operators, reject = self._deepest
        return reject if reject is not None and 2 * operators >= self._operators else None

    def _match_all(self, node: fx.Node) -> Iterator[_PartialMatch]:
        others = [o for o in self.outputs if o is not self.anchor]
        for found in self._match_anchor(node):
            yield from self._match_outputs(others, found)

    def _match_anchor(self, node: fx.Node) -> Iterator[_PartialMatch]:
        yield from self._match_node(self.anchor, node, (), _PartialMatch())
        # Autograd adds up the gradients of a tensor in the order in which it computes them. Where the pattern's gradient is a sum
        # of two terms, the graph may add a third between them (a residual connection): (other + a) + b for other + (a + b).
        is_gradient = self.anchor in self.pattern.outputs[self.pattern.forward_outputs :]
        if not (is_gradient and is_plain_sum(self.anchor) and is_plain_sum(node)):
            return
        (left, left_sums), (right, right_sums) = (sum_terms(n) for n in node.args[:2])
        terms = [*left, *right]
        if len(terms) == 2:
            return
        for x, y in itertools.product(left, right):
            for a, b in (self.anchor.args[:2], self.anchor.args[1::-1]):
                if same_target(a.target, x.target) and same_target(b.target, y.target):
                    for first in self._match_node(a, x, (), _PartialMatch()):
                        for found in self._match_node(b, y, (), first):
                            yield dataclasses.replace(
                                found,
                                nodes={**found.nodes, self.anchor: (node, ())},
                                other_terms=tuple(t for t in terms if t is not x and t is not y),
                                sums=(*left_sums, *right_sums),
                            )

    def _match_outputs(self, remaining: list[fx.Node], partial: _PartialMatch) -> Iterator[_PartialMatch]:
        if not remaining:
            yield partial
            return
        output, *rest = remaining
        if output in partial.nodes or output in partial.inputs:
            yield from self._match_outputs(rest, partial)
            return
        candidates = [n for n in _output_candidates(output, partial) if n.op == "call_function" and same_target(output.target, n.target)]
        if not candidates:
            self._fail(partial, f"no {g.describe(output)} for another output of the pattern", next(iter(partial.nodes.values()))[0])
        for candidate in candidates:
            for found in self._match_node(output, candidate, (), partial):
                yield from self._match_outputs(rest, found)

    def _match_node(self, expected: fx.Node, node: Any, views: _Views, partial: _PartialMatch) -> Iterator[_PartialMatch]:
        """Matches one node of the pattern and all that it depends on with ``node``, whose result passes through ``views``."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            self._fail(partial, f"no match within {_MAX_STEPS} steps: there are too many combinations", node)
        elif expected.op == "placeholder":
            yield from self._match_input(expected, node, views, partial)
        elif expected in partial.nodes:
            if partial.nodes[expected] == (node, views):
                yield partial
            else:
                self._fail(partial, f"two different nodes where the pattern uses one {g.describe(expected)} twice", node)
        elif expected.target is aten.alias.default and not (isinstance(node, fx.Node) and node.target is aten.alias.default):
            yield from self._match_node(expected.args[0], node, views, partial)
        elif not isinstance(node, fx.Node) or node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            found = g.describe(node) if isinstance(node, fx.Node) else repr(node)
            self._fail(partial, f"expected {g.describe(expected)}, found {found}", node)
        elif same_target(expected.target, node.target):
            yield from self._match_call(expected, node, views, partial)
        elif node.target in (aten.alias.default, aten.detach.default):
            yield from self._match_node(expected, node.args[0], views, partial)
        elif node.target in MOVABLE_VIEWS and torch.Tag.pointwise in expected.target.tags:
            yield from self._match_node(expected, node.args[0], (node, *views), partial)
        else:
            self._fail(partial, f"expected {g.describe(expected)}, found {g.describe(node)}", node)

    def _match_input(self, expected: fx.Node, node: Any, views: _Views, partial: _PartialMatch) -> Iterator[_PartialMatch]:
        if not g.is_tensor(node):
            self._fail(partial, "a number where a tensor is expected", node)
            return
        binding = InputBinding(node, views)
        if partial.inputs.get(expected, binding) == binding:
            yield dataclasses.replace(partial, inputs={**partial.inputs, expected: binding})
        else:
            self._fail(partial, f"{expected.name} stands for two different tensors", node)

    def _match_call(self, expected: fx.Node, node: fx.Node, views: _Views, partial: _PartialMatch) -> Iterator[_PartialMatch]:
        if views and not is_pointwise_of_one_shape(node):
            self._fail(partial, f"{g.describe(views[0])} between the operators can't be moved before {g.describe(node)}", node)
            return
        partial = dataclasses.replace(partial, nodes={**partial.nodes, expected: (node, views)})
        wanted, actual = g.arguments(expected), g.arguments(node)
        orders = [list(zip(wanted.items(), actual.values()))]
        if expected.target in COMMUTATIVE and actual.get("alpha", 1) == 1:
            swapped = {**actual, "self": actual["other"], "other": actual["self"]}
            orders.append(list(zip(wanted.items(), swapped.values())))
        for pairs in orders:
            yield from self._match_arguments(pairs, expected, node, views, partial)

    def _match_arguments(
        self, pairs: list, expected: fx.Node, node: fx.Node, views: _Views, partial: _PartialMatch
    ) -> Iterator[_PartialMatch]:
        if not pairs:
            yield partial
            return
        ((name, wanted), actual), *rest = pairs
        for found in self._match_argument(name, wanted, actual, expected, node, views, partial):
            yield from self._match_arguments(rest, expected, node, views, found)

    def _match_argument(
        self, name: str, wanted: Any, actual: Any, expected: fx.Node, node: fx.Node, views: _Views, partial: _PartialMatch
    ) -> Iterator[_PartialMatch]:
        if isinstance(wanted, fx.Node) and g.is_tensor(wanted):
            yield from self._match_node(wanted, actual, views, partial)
        elif isinstance(wanted, (list, tuple)):
            if not isinstance(actual, (list, tuple)) or len(wanted) != len(actual):
                self._fail(partial, f"{g.describe(node)}: {name} is {actual}, the pattern has {wanted}", node)
                return
            states = [partial]
            for w, a in zip(wanted, actual):
                states = [new for old in states for new in self._match_argument(name, w, a, expected, node, views, old)]
            yield from states
        elif isinstance(wanted, fx.Node) or (isinstance(actual, fx.Node) and isinstance(wanted, int)):
            yield dataclasses.replace(partial, sizes=(*partial.sizes, (wanted, actual, node)))
        elif is_number(wanted) and wanted in self.scalars:
            scalar = self.scalars[wanted]
            if isinstance(actual, (int, float)) and partial.scalars.get(scalar, actual) == actual:
                yield dataclasses.replace(partial, scalars={**partial.scalars, scalar: actual})
            else:
                self._fail(partial, f"{g.describe(node)}: {name} is not one number that {scalar!r} could stand for", node)
        elif same_constant(name, wanted, actual, expected, node):
            yield partial
        else:
            self._fail(partial, f"{g.describe(node)}: {name} is {_spell(actual)}, the pattern has {_spell(wanted)}", node)

    def _fail(self, partial: _PartialMatch, reason: str, node: Any) -> None:
        if len(partial.nodes) > self._deepest[0] or self._deepest[1] is None:
            self._deepest = (len(partial.nodes), Reject(reason, node if isinstance(node, fx.Node) else None))

    def _mismatch(self, found: _PartialMatch) -> Reject | None:
        """Compares dtypes, ranks and sizes of a structurally complete match."""
        values: dict[Any, Any] = {}  # of the pattern's symbolic sizes
        for placeholder, bound in found.inputs.items():
            expected, actual = g.value(placeholder), g.value(bound.node)
            if expected.dtype != actual.dtype:
                return Reject(f"wrong dtype: {actual.dtype} where the pattern was registered with {expected.dtype}", bound.node)
            if expected.dim() != len(bound.shape):
                return Reject(f"wrong rank: {len(bound.shape)} where the pattern was registered with {expected.dim()}", bound.node)
            for d, size in sizes.symbolic(expected.shape):
                if size.node.expr.is_symbol:
                    values.setdefault(size.node.expr, bound.shape[d])
        pairs = [(e, a, b.node) for p, b in found.inputs.items() for e, a in zip(g.value(p).shape, b.shape)]
        pairs += [(_number(e), _number(a), n) for e, a, n in found.sizes]
        for expected, actual, node in pairs:
            wanted = sizes.evaluate(expected, values)
            if wanted is None or isinstance(actual, torch.Tensor) or not g.same_size(wanted, actual):
                return Reject(f"a size is {actual} where the pattern's other sizes make it {wanted} (a broadcast?)", node)
        return None


def _number(value: Any) -> Any:
    return g.value(value) if isinstance(value, fx.Node) else value


def _spell(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


def _output_candidates(output: fx.Node, partial: _PartialMatch) -> list[fx.Node]:
    """The nodes of the graph that are as many edges away from something matched as ``output`` is in the pattern."""
    level, edges = [output], 0
    while level:
        level = list(dict.fromkeys(i for n in level for i in n.all_input_nodes))
        edges += 1
        reached = {partial.nodes[n][0] for n in level if n in partial.nodes} | {
            partial.inputs[n].node for n in level if n in partial.inputs
        }
        if reached:
            for _ in range(edges):
                reached = {u for n in reached for u in n.users}
            return sorted(reached)
    return []
