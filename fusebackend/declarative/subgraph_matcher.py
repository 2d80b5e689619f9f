"""Finds a traced pattern as a subgraph of another graph.

Every argument of every matched node is compared: it must correspond to a node of the pattern, an input, a named number, a
size that follows from the inputs' sizes, or an equal constant. Commutative operators match in either order, by backtracking.
A view between pointwise operators does not prevent a match: the replacement applies it to the inputs instead. Nor does a cast between
floating-point types, as long as no precision is lost (:mod:`fusebackend.declarative.precision`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.declarative import sizes
from fusebackend.declarative.examples import is_number
from fusebackend.declarative.node_comparison import (
    COMMUTATIVE,
    MOVABLE_VIEWS,
    ancestors,
    as_power_of,
    computes_again,
    computes_alike,
    equivalent_targets,
    has_value_of,
    is_alias,
    is_plain_sum,
    is_pointwise_of_one_shape,
    nodes_of_same_value,
    same_constant,
    same_target,
    sum_terms,
)
from fusebackend.declarative.partial_match import InputBinding, PartialMatch, SubgraphMatch, Views
from fusebackend.declarative.precision import is_cast, is_lossless_cast, judge, number_held_by, same_number, through_casts
from fusebackend.declarative.trace import Trace
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten

_MAX_STEPS = 20_000  # bounds the backtracking of ambiguous patterns, which could take minutes


Loose = Literal["sources", "casts"] | None


class SubgraphMatcher:
    """Looks for one trace in other graphs.

    Args:
        pattern: the trace to look for.
        scalars: the constants in it that match any number, with the name of each.
        exact: whether the graph may not round between the operators where the pattern does not.
        loose: whether ranks, dims, sizes and dtypes may be others: what is found then says what to trace, not what to replace. The
            arguments that are found are what casts convert (``"sources"``) or give (``"casts"``).

    Attributes:
        outputs: what the pattern computes and returns, without repetitions. An input that it returns (a gradient that is passed on)
            is not among them: it stays what it is.
        anchor: the output that depends on most of the pattern, where matching starts.
        targets: the operators at which it may start.
    """

    def __init__(self, pattern: Trace, scalars: Mapping[Any, str], *, exact: bool = False, loose: Loose = None):
        self.pattern = pattern
        self.scalars = scalars
        self._ints = {name for stand_in, name in scalars.items() if isinstance(stand_in, int)}
        self._exact, self._loose = exact, loose
        self.outputs = [o for o in dict.fromkeys(pattern.outputs) if o is not None and o.op != "placeholder"]
        self.anchor = max(self.outputs, key=lambda o: len(ancestors(o)))
        self.targets = equivalent_targets(self.anchor.target) | equivalent_targets(through_casts(self.anchor).target)
        self._operators = len([n for n in pattern.graph.nodes if n.op == "call_function" and g.is_tensor(n) and not is_cast(n)])
        arguments = [*pattern.inputs, *pattern.tangents, *pattern.outputs]
        self._works_in = frozenset(g.value(n).dtype for n in arguments if n is not None and g.value(n).is_floating_point())

    def find(self, node: fx.Node) -> SubgraphMatch | Reject | None:
        """Matches the pattern with its anchor at ``node``.

        Returns:
            The match; a Reject if at least half of the pattern's operators were found; None otherwise.
        """
        return copy.copy(self)._find(node)  # threads may compile at once, and a search counts its steps

    def nearest(self, node: fx.Node) -> tuple[float, Reject] | None:
        """How much of the pattern is at ``node``, from 0 to 1, and what differs; None if it is there whole."""
        search = copy.copy(self)
        if isinstance(search._find(node), SubgraphMatch):
            return None
        operators, reject = search._deepest
        return min(operators / max(self._operators, 1), 1.0), reject or Reject("nothing of the pattern", node)

    def _find(self, node: fx.Node) -> SubgraphMatch | Reject | None:
        self._steps = 0
        # How many operators the best incomplete match has, and what prevented it from being complete.
        self._deepest: tuple[int, Reject | None] = (0, None)
        for found in self._match_all(node):
            nodes = {p: image for p, (image, _) in found.nodes.items()}
            problem = self._mismatch(found) or judge(nodes, found.casts, self._works_in, self._exact) if not self._loose else ""
            if isinstance(problem, str):
                views = frozenset(v for _, views in found.nodes.values() for v in views) | set(found.casts)
                return SubgraphMatch(nodes, found.inputs, found.scalars, views, found.other_terms, found.sums, problem)
            if self._deepest[0] <= self._operators:  # of several complete structures, the first gives the reason
                self._deepest = (self._operators + 1, problem)
        operators, reject = self._deepest
        return reject if reject is not None and 2 * operators >= self._operators else None

    def _match_all(self, node: fx.Node) -> Iterator[PartialMatch]:
        others = [o for o in self.outputs if o is not self.anchor]
        for found in self._match_anchor(node):
            yield from self._match_outputs(others, found)

    def _match_anchor(self, node: fx.Node) -> Iterator[PartialMatch]:
        yield from self._match_node(self.anchor, node, (), PartialMatch())
        # Autograd adds up the gradients of a tensor in the order in which it computes them. Where the pattern's gradient is a sum
        # of two terms, the graph may add a third between them (a residual connection): (other + a) + b for other + (a + b).
        is_gradient = self.anchor in self.pattern.outputs[self.pattern.forward_outputs :]
        if not (is_gradient and is_plain_sum(self.anchor) and is_plain_sum(node)):
            return
        (left, left_sums), (right, right_sums) = (sum_terms(n) for n in node.args[:2])
        terms = [*left, *right]
        if len(terms) == 2 or len(set(terms)) < len(terms):  # of a term that counts twice it can't be said which one is left
            return
        for x, y in itertools.product(left, right):
            for a, b in (self.anchor.args[:2], self.anchor.args[1::-1]):
                if same_target(a.target, x.target) and same_target(b.target, y.target):
                    for first in self._match_node(a, x, (), PartialMatch()):
                        for found in self._match_node(b, y, (), first):
                            yield dataclasses.replace(
                                found,
                                nodes={**found.nodes, self.anchor: (node, ())},
                                other_terms=tuple(t for t in terms if t is not x and t is not y),
                                sums=(*left_sums, *right_sums),
                            )

    def _match_outputs(self, remaining: list[fx.Node], partial: PartialMatch) -> Iterator[PartialMatch]:
        if not remaining:
            yield partial
            return
        output, *rest = remaining
        if output in partial.nodes or output in partial.inputs:
            yield from self._match_outputs(rest, partial)
            return
        targets = (output.target, through_casts(output).target)
        candidates = [
            n
            for n in _output_candidates(output, partial)
            if n.op == "call_function" and any(same_target(t, n.target) for t in targets) and (self._loose or _same_dtype(output, n))
        ]
        if not candidates:
            self._fail(partial, f"no {g.describe(output)} for another output of the pattern", next(iter(partial.nodes.values()))[0])
        for candidate in candidates:
            for found in self._match_node(output, candidate, (), partial):
                yield from self._match_outputs(rest, found)

    def _match_node(self, expected: fx.Node, node: Any, views: Views, partial: PartialMatch) -> Iterator[PartialMatch]:
        """Matches one node of the pattern and all that it depends on with ``node``, whose result passes through ``views``."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            self._fail(partial, f"no match within {_MAX_STEPS} steps: there are too many combinations", node)
        elif expected.op == "placeholder":
            yield from self._match_input(expected, node, views, partial)
        elif expected in partial.nodes:
            image, seen = partial.nodes[expected]
            again = computes_again(through_casts(node), through_casts(image)) if views == seen and isinstance(node, fx.Node) else None
            if again is not None and g.mutation_between(*sorted((node, image))) is None:
                casts = () if node is image else _casts_of(node)
                yield dataclasses.replace(partial, casts=(*partial.casts, *casts, *again))
            else:
                self._fail(partial, f"two different nodes where the pattern uses one {g.describe(expected)} twice", node)
        elif is_alias(expected) and not is_alias(node):
            yield from self._match_node(expected.args[0], node, views, partial)
        elif is_cast(expected) and g.is_tensor(node) and not is_cast(node):
            yield from self._match_through_casts(expected, node, views, partial)
        elif expected.target is operator.getitem and isinstance(node, fx.Node) and node.target is operator.getitem:
            if not views and expected.args[1] == node.args[1]:
                partial = dataclasses.replace(partial, nodes={**partial.nodes, expected: (node, ())})
                yield from self._match_node(expected.args[0], node.args[0], (), partial)
            else:
                self._fail(partial, f"another result of {g.describe(node.args[0])}, or a view of it", node)
        elif not isinstance(node, fx.Node) or node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            found = g.describe(node) if isinstance(node, fx.Node) else repr(node)
            self._fail(partial, f"expected {g.describe(expected)}, found {found}", node)
        elif same_target(expected.target, node.target):
            yield from self._match_call(expected, node, views, partial)
            if is_cast(expected) and is_cast(node):
                yield from self._match_through_casts(expected, node, views, partial)
        elif is_cast(node):
            yield from self._match_through_casts(expected, node, views, partial)
        elif as_power_of(node, expected, node) or as_power_of(expected, expected, node):
            yield from self._match_power(expected, node, views, partial)
        elif is_alias(node):
            yield from self._match_node(expected, node.args[0], views, partial)
        elif node.target in MOVABLE_VIEWS and torch.Tag.pointwise in getattr(expected.target, "tags", ()):
            yield from self._match_node(expected, node.args[0], (node, *views), partial)
        else:
            self._fail(partial, f"expected {g.describe(expected)}, found {g.describe(node)}", node)

    def _match_through_casts(self, expected: fx.Node, node: fx.Node, views: Views, partial: PartialMatch) -> Iterator[PartialMatch]:
        partial = dataclasses.replace(partial, casts=(*partial.casts, *_casts_of(node)))
        node = through_casts(node)
        for found in self._match_node(through_casts(expected), node, views, partial):
            converted = dict.fromkeys(_casts_of(expected), (node, views))  # what a cast of the pattern gives is there without it
            if all(found.nodes.get(c, image) == image for c, image in converted.items()):
                yield dataclasses.replace(found, nodes={**found.nodes, **converted})

    def _match_power(self, expected: fx.Node, node: fx.Node, views: Views, partial: PartialMatch) -> Iterator[PartialMatch]:
        if views and not is_pointwise_of_one_shape(node):
            return
        partial = dataclasses.replace(partial, nodes={**partial.nodes, expected: (node, views)})
        wanted, actual = expected.all_input_nodes, node.all_input_nodes
        if len(wanted) == len(actual) == 1:  # one operand, which a product uses twice
            yield from self._match_node(wanted[0], actual[0], views, partial)

    def _match_input(self, expected: fx.Node, node: Any, views: Views, partial: PartialMatch) -> Iterator[PartialMatch]:
        if not g.is_tensor(node):
            self._fail(partial, "a number where a tensor is expected", node)
            return
        while is_lossless_cast(node) and (self._loose == "sources" or not (self._loose or _same_dtype(expected, node))):
            partial = dataclasses.replace(partial, casts=(*partial.casts, node))
            node = node.args[0]
        binding = InputBinding(node, views)
        known = partial.inputs.get(expected, binding)
        if known == binding:
            yield dataclasses.replace(partial, inputs={**partial.inputs, expected: binding})
        elif views == known.views and has_value_of(node, known.node):
            # A program may compute it twice; PyTorch's norms copy what lies in another order, for their forward and not for their backward.
            yield partial
        else:
            self._fail(partial, f"{expected.name} stands for two different tensors", node)

    def _match_call(self, expected: fx.Node, node: fx.Node, views: Views, partial: PartialMatch) -> Iterator[PartialMatch]:
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
        self, pairs: list, expected: fx.Node, node: fx.Node, views: Views, partial: PartialMatch
    ) -> Iterator[PartialMatch]:
        if not pairs:
            yield partial
            return
        ((name, wanted), actual), *rest = pairs
        for found in self._match_argument(name, wanted, actual, expected, node, views, partial):
            yield from self._match_arguments(rest, expected, node, views, found)

    def _match_argument(
        self, name: str, wanted: Any, actual: Any, expected: fx.Node, node: fx.Node, views: Views, partial: PartialMatch
    ) -> Iterator[PartialMatch]:
        if self._loose and name in _DIMS_AND_SIZES:
            yield partial
            return
        if is_number(wanted) and isinstance(actual, fx.Node):
            held = number_held_by(actual)
            actual = actual if held is None or not computes_alike(node, actual, held) else held
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
            accepted = int if scalar in self._ints else (int, float)  # an int's replacement may hold it where it would cut a float
            if isinstance(actual, accepted) and same_number(known := partial.scalars.get(scalar, actual), actual, _dtype(node)):
                yield dataclasses.replace(partial, scalars={**partial.scalars, scalar: known})
            else:
                self._fail(partial, f"{g.describe(node)}: {name} is not one number that {scalar!r} could stand for", node)
        elif same_constant(name, wanted, actual, expected, node):
            yield partial
        else:
            self._fail(partial, f"{g.describe(node)}: {name} is {_spell(actual)}, the pattern has {_spell(wanted)}", node)

    def _fail(self, partial: PartialMatch, reason: str, node: Any) -> None:
        if len(partial.nodes) > self._deepest[0] or self._deepest[1] is None:
            self._deepest = (len(partial.nodes), Reject(reason, node if isinstance(node, fx.Node) else None))

    def _mismatch(self, found: PartialMatch) -> Reject | None:
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
            if wanted is None or isinstance(actual, torch.Tensor) or not (_same_float(wanted, actual) or g.same_size(wanted, actual)):
                why = "a broadcast? or are sizes of the example equal by chance?"
                return Reject(f"a size is {actual} where the pattern's other sizes make it {wanted} ({why})", node)
        return None


_DIMS_AND_SIZES = frozenset({"dim", "dims", "size", "shape", "normalized_shape", "split_size", "split_sizes"})


def _casts_of(node: Any) -> Iterator[fx.Node]:
    while is_cast(node):
        yield node
        node = node.args[0]


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(g.value(node), "dtype", None)


def _same_dtype(expected: fx.Node, node: fx.Node) -> bool:
    return _dtype(expected) == _dtype(node)


def _number(value: Any) -> Any:
    return g.value(value) if isinstance(value, fx.Node) else value


def _same_float(a: Any, b: Any) -> bool:
    return isinstance(a, float) and isinstance(b, float) and a == b


def _spell(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


def _output_candidates(output: fx.Node, partial: PartialMatch) -> list[fx.Node]:
    """The nodes of the graph that are as many edges away from something matched as ``output`` is in the pattern. Casts do not count."""
    level, edges = [through_casts(output)], 0
    while level:
        level = list(dict.fromkeys(through_casts(i) for n in level for i in n.all_input_nodes))
        edges += 1
        reached = {partial.nodes[n][0] for n in level if n in partial.nodes} | {
            partial.inputs[n].node for n in level if n in partial.inputs
        }
        if reached:
            reached = {n for r in reached for n in nodes_of_same_value(r)}
            for _ in range(edges):
                reached = _with_casts({u for n in _with_casts(reached) for u in n.users})
            return sorted(reached)
    return []


def _with_casts(nodes: set[fx.Node]) -> set[fx.Node]:
    """The nodes and all their casts."""
    found, stack = set(nodes), list(nodes)
    while stack:
        new = [u for u in stack.pop().users if is_cast(u) and u not in found]
        found.update(new)
        stack += new
    return found
