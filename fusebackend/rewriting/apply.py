"""Finds the matches in a graph and applies them; nothing is committed before it was checked.

A match is applied only if the replacement's fake outputs agree with the originals' in shape, dtype, stride, device and
aliasing, the swallowed nodes have no other users, and no mutation lies between. Whatever goes wrong at a site becomes
its reason in the report, and the site stays as it was.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.multiprocessing.reductions import StorageWeakRef

from fusebackend import fx_utils as g
from fusebackend.log import log, warn_once
from fusebackend.profitability.policy import Gate
from fusebackend.report import model as report
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject, inherited_meta


class Fuel:
    """How many substitutions may still be applied (``fuse.fuel``); None is no limit."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.applied: list[report.Substitution] = []

    @property
    def empty(self) -> bool:
        return self.limit is not None and len(self.applied) >= self.limit


def rewrite(
    graph: fx.Graph,
    patterns: Sequence[Pattern],
    name: str,
    result: report.Report,
    *,
    strict: bool = False,
    fuel: Fuel | None = None,
    check: bool = False,
    code: bool | None = None,
    gate: Gate | None = None,
) -> int:
    """Applies ``patterns`` to ``graph`` and records what happened in ``result`` under the graph's ``name``.

    Args:
        strict: raise what a pattern raises, instead of recording it and leaving the site alone.
        fuel: a limit on the number of substitutions.
        check: keep each original region beside its replacement and record how far they differ when they run.
        code: whether a graph in which nothing was found is recorded too: with its code (True, costs milliseconds), without
            it (False), or not at all (None).
        gate: asked of each replacement whether it pays; None applies all.

    Returns:
        The number of substitutions.
    """
    fuel = fuel or Fuel()
    fake_mode = None
    candidates: list[tuple[Pattern, fx.Node, Match]] = []
    for pattern, node in _anchors(graph, patterns):
        answer = _ask(pattern, node, strict)
        if isinstance(answer, Match):
            candidates.append((pattern, node, answer))
        elif isinstance(answer, Reject):
            _record_rejection(result, name, pattern, node, answer)
    # Of two that overlap, the higher priority goes first, then the larger; the sort keeps graph order otherwise.
    candidates.sort(key=lambda c: (-c[0].priority, -len(c[2].nodes)))
    shown = bool(candidates) or any(r.graph == name for r in result.rejections)
    if not shown and code is None:
        return 0
    shown = shown or bool(code)
    before, nodes_before = (report.graph_code(graph), report.graph_nodes(graph)) if shown else ("", ())

    applied = 0
    taken: dict[fx.Node, Pattern] = {}
    for pattern, node, match in candidates:
        winner = next((taken[n] for n in match.nodes if n in taken), None)
        if winner is pattern:
            continue  # another anchor of the same region
        if winner is not None:
            _record_rejection(result, name, pattern, node, Reject(f"overlaps with a substitution by {winner.name!r}"))
            continue
        # Earlier substitutions have changed the graph around this node: ask again.
        outcome: report.Substitution | Match | Reject | None = _ask(pattern, node, strict) if applied else match
        if isinstance(outcome, Match):
            if fuel.empty:
                outcome = Reject("out of fuel (option fuse.fuel)")
            else:
                fake_mode = fake_mode or detect_fake_mode([g.value(n) for n in graph.nodes if g.is_tensor(n)])
                outcome = _apply(pattern, outcome, name, fake_mode, strict, check, gate)
        if isinstance(outcome, report.Substitution):
            taken.update(dict.fromkeys(match.nodes, pattern))
            result.substitutions.append(outcome)
            fuel.applied.append(outcome)
            log.info("%s in %s at %s: %s", outcome.pattern, name, outcome.source, outcome.note or " ".join(outcome.replacement))
            applied += 1
        elif isinstance(outcome, Reject):
            _record_rejection(result, name, pattern, node, outcome)
    after, nodes_after = (report.graph_code(graph), report.graph_nodes(graph, nodes_before)) if applied else (before, nodes_before)
    result.graphs.append(report.GraphCode(name, before, after, len(graph.nodes), nodes_before, nodes_after))
    return applied


def _anchors(graph: fx.Graph, patterns: Sequence[Pattern]) -> Iterator[tuple[Pattern, fx.Node]]:
    by_target: dict[object, list[Pattern]] = collections.defaultdict(list)
    for pattern in patterns:
        for target in pattern.anchors:
            by_target[target].append(pattern)
    for node in graph.nodes:
        if node.op == "call_function":
            for pattern in by_target.get(node.target, ()):
                yield pattern, node


def _ask(pattern: Pattern, node: fx.Node, strict: bool) -> Match | Reject | None:
    try:
        return pattern.match(node)
    except Exception as error:
        return _fault(pattern, node, "matching", error, strict)


def _fault(pattern: Pattern, node: fx.Node, doing: str, error: Exception, strict: bool) -> Reject:
    if strict:
        raise error
    reason = f"{doing} raised {type(error).__name__}: {error}"
    warn_once(f"pattern {pattern.name!r}: {reason} (site left to Inductor; fuse.strict=True raises)")
    return Reject(reason, node)


def _record_rejection(result: report.Report, name: str, pattern: Pattern, anchor: fx.Node, reject: Reject) -> None:
    node = anchor if reject.node is None else reject.node
    source = report.source_of(node)
    if not source.file:
        source = report.source_of(anchor)
    result.rejections.append(report.Rejection(pattern.name, name, source, reject.reason, node.name))
    log.debug("%s in %s left to Inductor at %s (%s): %s", pattern.name, name, source, node.name, reject.reason)


def _apply(
    pattern: Pattern, match: Match, name: str, fake_mode: Any, strict: bool, check: bool, gate: Gate | None
) -> report.Substitution | Reject:
    """Emits the replacement, checks it, and only then lets it take the place of the original."""
    anchor = min(match.outputs)
    inside = set(match.nodes)
    for node in match.interior:
        outsider = next((u for u in node.users if u not in inside), None)
        if outsider is not None:
            return Reject(f"{g.describe(node)} inside the match is also used by {g.describe(outsider)}", node)
    random = next((n for n in match.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())), None)
    if random is not None:
        return Reject(f"{g.describe(random)} draws random numbers: replacing it would draw others", random)
    mutation = g.mutation_between(min(inside), max(inside))
    if mutation is not None:
        return Reject(f"{g.describe(mutation)} mutates memory between the matched nodes", mutation)

    emitter = Emitter(match.outputs, fake_mode)
    try:
        emitted = match.emit(emitter)
        new = (emitted,) if isinstance(emitted, fx.Node) else tuple(emitted)
        problem = _problem(match, new, emitter)
        if not problem and pattern.level == "joint" and g.is_joint(anchor.graph):
            problem = _reads_a_mutated_input(emitter)
    except Exception as error:
        _erase(emitter.nodes)
        return _fault(pattern, anchor, "building the replacement", error, strict)
    if problem:
        _erase(emitter.nodes)
        return Reject(f"the replacement is not the same: {problem}", anchor)
    refusal = gate.refusal(pattern, name, match, new, emitter.nodes) if gate is not None else None
    if refusal is not None:
        _erase(emitter.nodes)
        return refusal if refusal.node is not None else dataclasses.replace(refusal, node=anchor)

    _inherit_meta(match.outputs, new, set(emitter.nodes))
    record = report.describe_substitution(pattern.name, name, match.nodes, match.outputs, emitter.nodes, match.note)
    if check:
        _compare(match.outputs, new, f"{pattern.name} in {name}, {record.source}")
        return record
    for old, replacement in zip(match.outputs, new):
        old.replace_all_uses_with(replacement)
    _erase(match.nodes)
    return record


def _compare(outputs: Sequence[fx.Node], new: Sequence[fx.Node], site: str) -> None:
    """Lets the users see the replacement through an operator that also looks at the original."""
    from fusebackend.rewriting.numeric_check import compare

    for old, replacement in zip(outputs, new):
        with old.graph.inserting_after(max(old, replacement)):
            checked = old.graph.call_function(compare, (replacement, old, site))
        checked.meta.update(inherited_meta(old), val=g.value(replacement))
        old.replace_all_uses_with(checked, delete_user_cb=functools.partial(operator.is_not, checked))


def _inherit_meta(outputs: Sequence[fx.Node], new: Sequence[fx.Node], emitted: set[fx.Node]) -> None:
    """Each new node takes over the origin of the first output that it serves: forward nodes of a forward one."""
    left = set(emitted)
    for old, replacement in zip(outputs, new):
        stack = [replacement]
        while stack:
            node = stack.pop()
            if node in left:
                left.discard(node)
                node.meta.update(inherited_meta(old))
                stack += node.all_input_nodes


def _erase(nodes: Sequence[fx.Node]) -> None:
    for node in sorted(set(nodes), reverse=True):
        node.graph.erase_node(node)


def _problem(match: Match, new: tuple[fx.Node, ...], emitter: Emitter) -> str | None:
    """Why the emitted nodes may not replace the outputs; None if they may."""
    if len(new) != len(match.outputs):
        return f"{len(match.outputs)} outputs became {len(new)}"
    inside, emitted = set(match.nodes), set(emitter.nodes)
    inputs = {i for n in emitted for i in n.all_input_nodes} - emitted
    for node in inputs:
        if node in inside:
            return f"it uses {node.name}, which it replaces"
    for node in emitted:
        late = next((i for i in node.all_input_nodes if not i < node), None)
        if late is not None:
            return f"it uses {late.name}, which is computed later"
        for source in node.all_input_nodes:
            overwritten = next((u for u in source.users if g.is_mutating(u) and u.args[0] is source and u < node), None)
            if overwritten is not None and not any(overwritten < n for n in source.users if n in inside):
                return f"it uses {source.name} after {overwritten.name} has overwritten it"
    for old, replacement in zip(match.outputs, new):
        early = next((u for u in old.users if u not in inside and not replacement < u), None)
        if early is not None:
            return f"{early.name} needs it before all its inputs are there"
    for old, replacement in zip(match.outputs, new):
        found = g.difference(g.value(old), g.value(replacement))
        if found:
            return found
        for node in inputs:
            if _shares_storage(g.value(node), g.value(old)) != _shares_storage(g.value(node), g.value(replacement)):
                return f"it and the original differ in whether the output aliases {node.name}"
    return None


def _reads_a_mutated_input(emitter: Emitter) -> str | None:
    """An original whose backward has only what was computed from an input doesn't mind that the program mutates the input
    later on; a replacement that is given the input itself, to compute it again, does."""
    emitted = set(emitter.nodes)
    mutated = next((i for n in emitter.nodes for i in n.all_input_nodes if i not in emitted and g.is_mutated_input(i)), None)
    return None if mutated is None else f"it reads {mutated.name}, which the program mutates later on"


def _shares_storage(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())
