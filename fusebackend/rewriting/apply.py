"""Finds the matches in a graph and applies them, each after it was checked (:mod:`fusebackend.rewriting.checks`).

Whatever goes wrong at a site becomes its reason in the report, and the site stays as it was.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from fusebackend import fx_utils as g
from fusebackend.garbage import collection_paused
from fusebackend.log import log, warn_once
from fusebackend.rewriting import checks, describe, inquiry, numeric_check
from fusebackend.rewriting.fuel import Fuel
from fusebackend.rewriting.graph_code import graph_code
from fusebackend.rewriting.outcome import GraphCode, GraphNode, GraphOutcome, Rejection, Substitution, Verdict
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Refusal, Reject, inherited_meta
from fusebackend.rewriting.profitability_policy import ProfitabilityPolicy, Proposal
from fusebackend.rewriting.provenance import module_of
from fusebackend.rewriting.repeated import merge_repeated
from fusebackend.rewriting.traffic import moved_bytes, operators

T = TypeVar("T")


def rewrite(
    graph: fx.Graph,
    patterns: Sequence[Pattern],
    name: str,
    *,
    strict: bool = False,
    fuel: Fuel | None = None,
    check: bool = False,
    code: bool | None = None,
    policy: ProfitabilityPolicy | None = None,
    priorities: Mapping[str, int] | None = None,
    inputs_called: tuple[str, ...] = (),
) -> GraphOutcome:
    """Applies ``patterns`` to ``graph``, which is called ``name``.

    Args:
        strict: raise what a pattern raises, instead of recording it and leaving the site alone.
        fuel: a limit on the number of substitutions.
        check: keep each original region beside its replacement and record how far they differ when they run.
        code: whether a graph without any match or near miss is shown too: with its code (True, takes milliseconds), without
            it (False), or not at all (None).
        policy: asked of each match whether it pays; None applies all.
        priorities: of the patterns, by name, where they are not to be those of now.
        inputs_called: the user's names of the inputs of Dynamo's graph, for the report.

    Returns:
        What was done.
    """
    with collection_paused():
        return _Rewriting(graph, name, strict, fuel or Fuel(), check, policy, priorities or {}).run(patterns, code, inputs_called)


class _Rewriting:
    """One graph that is being rewritten."""

    def __init__(
        self,
        graph: fx.Graph,
        name: str,
        strict: bool,
        fuel: Fuel,
        check: bool,
        policy: ProfitabilityPolicy | None,
        priorities: Mapping[str, int],
    ):
        self.graph, self.name = graph, name
        self.strict, self.fuel, self.check, self.policy = strict, fuel, check, policy
        self.priorities = priorities
        self.substitutions: list[Substitution] = []
        self.rejections: list[tuple[fx.Node, Rejection]] = []  # with the anchors
        self.verdicts: list[Verdict] = []
        self.unused: set[fx.Node] = set()  # that substitutions left without a use, and that are erased
        self.emitted: list[fx.Node] = []  # by substitutions

    def run(self, patterns: Sequence[Pattern], code: bool | None, inputs_called: tuple[str, ...] = ()) -> GraphOutcome:
        began = time.perf_counter()
        computing = operators(self.graph.nodes)
        whole = {"operators": len(computing), "moved_bytes": moved_bytes(computing)}
        shown, before, nodes_before = False, "", tuple[GraphNode, ...]()
        for last in (False, True):
            candidates = self.candidates([p for p in patterns if p.last == last])
            if not shown and (candidates or self.rejections or (code and last)):  # so far it is as it was
                shown = True
                before, nodes_before = graph_code(self.graph), describe.graph_nodes(self.graph, inputs_called=inputs_called)
            self.apply_all(candidates)
        merge_repeated(self.emitted)
        after, nodes_after = before, nodes_before
        if self.substitutions:
            after, nodes_after = graph_code(self.graph), describe.graph_nodes(self.graph, nodes_before)
        made = GraphCode(self.name, before, after, len(self.graph.nodes), nodes_before, nodes_after, **whole)
        return GraphOutcome(
            self.name,
            tuple(self.substitutions),
            tuple(rejection for _, rejection in self.rejections),
            tuple(self.verdicts),
            made if shown or code is not None else None,
            time.perf_counter() - began,
        )

    def candidates(self, patterns: Sequence[Pattern]) -> list[tuple[Pattern, fx.Node, Match]]:
        """All matches, in the order in which they are tried: by priority, then by size, then as they stand in the graph."""
        found = []
        for pattern, node in _anchors(self.graph, patterns):
            answer = self.match(pattern, node)
            if isinstance(answer, Match):
                found.append((pattern, node, answer))
            elif isinstance(answer, Reject):
                self.reject(pattern, node, answer)
            elif inquiry.asks_for(pattern.name):
                self.guarded(pattern, node, "comparing", functools.partial(inquiry.compare, pattern, node, self.name))
        return sorted(found, key=lambda c: (-self.priorities.get(c[0].name, c[0].priority), -len(c[2].nodes)))

    def apply_all(self, candidates: Sequence[tuple[Pattern, fx.Node, Match]]) -> None:
        taken: dict[fx.Node, Pattern] = {}
        for pattern, node, match in candidates:
            if node in self.unused:
                continue
            winner = next((taken[n] for n in match.nodes if n in taken), None)
            if winner is pattern:
                continue  # another anchor of the same region
            if winner is not None:
                self.reject(pattern, node, Reject(f"overlaps with a substitution by {winner.name!r}", code="overlap"))
                continue
            # Earlier substitutions have changed the graph around this node: match it again.
            answer = self.match(pattern, node) if self.substitutions else match
            made = self.apply(pattern, node, answer) if isinstance(answer, Match) else answer
            if isinstance(made, Substitution):
                applied = (*match.nodes, *answer.nodes) if isinstance(answer, Match) else match.nodes  # it may be another by now
                taken.update(dict.fromkeys(applied, pattern))
                self.substitutions.append(made)
                self.fuel.applied.append(made)
                log.info("%s in %s at %s: %s", made.pattern, self.name, made.source, made.note or " ".join(made.replacement))
            elif isinstance(made, Reject):
                self.reject(pattern, node, made)
        # A pattern may have begun, and missed, inside of what it then replaced.
        self.rejections = [(n, r) for n, r in self.rejections if n not in taken or taken[n].name != r.pattern]

    def match(self, pattern: Pattern, node: fx.Node) -> Match | Reject | None:
        return self.guarded(pattern, node, "matching", lambda: _answer(pattern, node))

    def apply(self, pattern: Pattern, node: fx.Node, match: Match) -> Substitution | Reject:
        """Builds the replacement, checks it, asks whether it pays, and only then lets it take the place of the original."""
        if self.fuel.empty:
            return Reject("out of fuel (option fuse.fuel)", code="out_of_fuel")
        wrong = checks.why_not_replaceable(match)
        if wrong is not None:
            return wrong
        policy = self.policy
        if policy is None:
            return self.propose(pattern, match, None)
        estimate = self.guarded(pattern, min(match.outputs), "estimating", lambda: policy.estimate(pattern, match))
        if isinstance(estimate, Reject):
            return estimate
        made = self.propose(pattern, match, estimate)
        if isinstance(made, Reject) and estimate.rival is not None:
            made = self.propose(pattern, match, estimate.rival)
        return made

    def propose(self, pattern: Pattern, match: Match, estimate: Estimate | None) -> Substitution | Reject:
        """Builds the replacement of which ``estimate`` tells, and asks whether it pays; without an estimate that of ``match``."""
        anchor, policy, proposal = min(match.outputs), self.policy, None
        if policy is not None and estimate is not None:
            match = estimate.instead or match
            proposal = Proposal(pattern, self.name, match, estimate)
            refusal = policy.refuse_unbuilt(proposal)
            if refusal is not None:
                return _at(refusal, anchor)
        emitter = Emitter(match.outputs, self.fake_mode)
        with policy.building(proposal) if policy is not None and proposal is not None else contextlib.nullcontext():
            built = self.guarded(pattern, anchor, "building the replacement", lambda: self.build(pattern, match, emitter))
        if isinstance(built, Reject):
            _erase(emitter.nodes)
            return built
        if policy is not None and proposal is not None:
            decision = policy.decide(proposal, built, emitter.nodes)
            if decision.verdict is not None:
                self.verdicts.append(dataclasses.replace(decision.verdict, module=module_of(anchor), node=match.outputs[0].name))
            if decision.refusal is not None:
                _erase(emitter.nodes)
                return _at(decision.refusal, anchor)
        return self.commit(pattern, match, built, emitter.nodes, estimate)

    @functools.cached_property
    def fake_mode(self) -> Any:
        return detect_fake_mode([g.value(n) for n in self.graph.nodes if g.is_tensor(n)])

    def build(self, pattern: Pattern, match: Match, emitter: Emitter) -> tuple[fx.Node, ...] | Reject:
        emitted = match.emit(emitter)
        new = (emitted,) if isinstance(emitted, fx.Node) else tuple(emitted)
        unknown = checks.unknown_order(emitter)
        if unknown:
            return Reject(unknown, min(match.outputs), "unsupported")
        problem = checks.difference(match, new, emitter)
        if not problem and pattern.level == "joint" and g.is_joint(self.graph):
            problem = checks.mutated_input(emitter) or checks.needs_gradients(match, new)
        return Reject(f"the replacement is not the same: {problem}", min(match.outputs), "illegal") if problem else new

    def commit(
        self, pattern: Pattern, match: Match, new: Sequence[fx.Node], emitted: Sequence[fx.Node], estimate: Estimate | None
    ) -> Substitution:
        _inherit_meta(match.outputs, new, set(emitted))
        self.emitted += emitted
        made = describe.substitution(pattern.name, self.name, match.nodes, match.outputs, emitted, match.note, estimate)
        if self.check:
            _compare(match.outputs, new, f"{pattern.name} in {self.name}, {made.source}", self.fake_mode)
            return made
        for old, replacement in zip(match.outputs, new):
            old.replace_all_uses_with(replacement)
            _update_views(old, replacement, self.fake_mode)
        inputs = g.inputs_of(match.nodes)
        _erase(match.nodes)
        self.erase_unused(inputs)
        return made

    def erase_unused(self, nodes: Sequence[fx.Node]) -> None:
        """Erases those of ``nodes``, and what only they read, that the original alone has used. They are no sites any more.

        Symbolic sizes stay: they cost nothing, and another replacement may need their value.
        """
        for node in nodes:
            pure = node.op == "call_function" and not node.is_impure() and not g.is_mutating(node)
            if pure and g.is_tensor(node) and not node.users and node not in self.unused:
                self.unused.add(node)
                inputs = node.all_input_nodes
                node.graph.erase_node(node)
                self.erase_unused(inputs)

    def guarded(self, pattern: Pattern, node: fx.Node, doing: str, call: Callable[[], T]) -> T | Reject:
        """What ``call`` returns, or the rejection that its exception becomes. An operator that refuses its arguments is no failure."""
        try:
            return call()
        except Refusal as refusal:
            return Reject(f"the operator refuses it: {refusal}", node, "unsupported")
        except Exception as error:
            reason = f"{doing} raised {type(error).__name__}: {error}"
            unknown = next((n for n in self.graph.nodes if n.users and not g.has_value(n)), None)
            if unknown is not None:  # most likely what was read and is not there
                cause = checks.without_value(unknown)
                return dataclasses.replace(cause, reason=f"{cause.reason}, and {reason}")
            if self.strict:
                raise
            warn_once(f"pattern {pattern.name!r}: {reason} (site left to Inductor; fuse.strict=True raises)")
            return Reject(reason, node, "failed")

    def reject(self, pattern: Pattern, anchor: fx.Node, reject: Reject) -> None:
        node = anchor if reject.node is None else reject.node
        source = describe.source_of(node)
        if not source.file:
            source = describe.source_of(anchor)
        made = Rejection(pattern.name, self.name, source, reject.reason, node.name, reject.code, module_of(node) or module_of(anchor))
        self.rejections.append((anchor, made))
        log.debug("%s in %s left to Inductor at %s (%s): %s", pattern.name, self.name, source, node.name, reject.reason)


def _answer(pattern: Pattern, node: fx.Node) -> Match | Reject | None:
    """What ``pattern`` answers at ``node``, if it can be an answer: anybody may write a pattern."""
    answer: object = pattern.match(node)
    if isinstance(answer, Match):
        wrong = [n for n in answer.nodes if not isinstance(n, fx.Node) or n.graph is not node.graph]
        if wrong or not answer.outputs:
            given = f"outputs={answer.outputs!r}, interior={answer.interior!r}"
            raise TypeError(f"match returned a Match with {given}; nodes of the graph are needed, and at least one output")
    elif answer is not None and not isinstance(answer, Reject):
        raise TypeError(f"match returned {answer!r}; a Match, a Reject or None is needed")
    return answer


def _anchors(graph: fx.Graph, patterns: Sequence[Pattern]) -> Iterator[tuple[Pattern, fx.Node]]:
    by_target: dict[object, list[Pattern]] = collections.defaultdict(list)
    for pattern in patterns:
        for target in pattern.anchors:
            by_target[target].append(pattern)
    for node in graph.nodes:
        if node.op == "call_function":
            for pattern in by_target.get(node.target, ()):
                yield pattern, node


def _at(reject: Reject, anchor: fx.Node) -> Reject:
    return reject if reject.node is not None else dataclasses.replace(reject, node=anchor)


def _compare(outputs: Sequence[fx.Node], new: Sequence[fx.Node], site: str, fake_mode: Any) -> None:
    """Lets the users read the replacement through an operator that also reads the original."""
    for old, replacement in zip(outputs, new):
        with old.graph.inserting_after(max(old, replacement)):
            checked = old.graph.call_function(numeric_check.compare, (replacement, old, site))
        checked.meta.update(inherited_meta(old), val=g.value(replacement))
        old.replace_all_uses_with(checked, delete_user_cb=functools.partial(operator.is_not, checked))
        _update_views(old, checked, fake_mode)


def _update_views(old: fx.Node, replacement: fx.Node, fake_mode: Any) -> None:
    """Gives the views of what was replaced new values, which share the replacement's memory. By these values PyTorch's passes judge whether
    a copy may go: a copy of the replacement may not where a view of it is returned too."""
    memory, stack = _storages(old), [*replacement.users]
    while stack:
        node = stack.pop()
        if node is replacement or node.op != "call_function" or not callable(node.target) or not memory & _storages(node):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with fake_mode or contextlib.nullcontext():
            node.meta["val"] = node.target(*args, **kwargs)
        stack += node.users


def _storages(node: fx.Node) -> set[int | None]:
    """The memory of a node's tensors. Held by their values, so that no other memory has the same number."""
    return {g.memory_of(t) for t in pytree.tree_leaves(g.value(node))} - {None}


def _inherit_meta(outputs: Sequence[fx.Node], new: Sequence[fx.Node], emitted: set[fx.Node]) -> None:
    """Each new node takes over the origin of the first output that it serves: a forward node that of a forward output."""
    unassigned = set(emitted)
    for old, replacement in zip(outputs, new):
        stack = [replacement]
        while stack:
            node = stack.pop()
            if node in unassigned:
                unassigned.discard(node)
                node.meta.update(inherited_meta(old))
                stack += node.all_input_nodes


def _erase(nodes: Sequence[fx.Node]) -> None:
    for node in sorted(set(nodes), reverse=True):
        node.graph.erase_node(node)
