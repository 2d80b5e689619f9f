"""Whether a match may be replaced, and whether what was built may replace it. Nothing is committed before these checks.

The replacement's fake outputs must agree with the originals' in shape, dtype, stride, device and aliasing; nobody else may use what
the match removes; no mutation may lie between the matched nodes, nor between the replacement and what it reads.
"""

from __future__ import annotations

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Emitter, Match, Reject


def why_not_replaceable(match: Match) -> Reject | None:
    """Why the matched nodes may not be replaced by anything; None if they may."""
    inside = set(match.nodes)
    unknown = next((n for m in match.nodes for n in (m, *m.all_input_nodes) if not g.has_value(n)), None)
    if unknown is not None:
        return without_value(unknown)
    for node in match.interior:
        outsider = next((u for u in node.users if u not in inside), None)
        if outsider is not None:
            return Reject(f"{g.describe(node)} inside the match is also used by {g.describe(outsider)}", node, "illegal")
    drawing = (n for n in match.nodes if n not in match.draws_nothing)
    random = next((n for n in drawing if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())), None)
    if random is not None:
        return Reject(f"{g.describe(random)} draws random numbers: replacing it would draw others", random, "illegal")
    mutation = g.mutation_between(min(inside), max(inside))
    if mutation is not None:
        return Reject(f"{g.describe(mutation)} mutates memory between the matched nodes", mutation, "illegal")
    return None


def without_value(node: fx.Node) -> Reject:
    """The refusal of what depends on a node of which a pass of the user did not say what it is."""
    return Reject(f"a pass made {g.describe(node)} without its shape and dtype (meta['val'])", node, "unsupported")


def unknown_order(emitter: Emitter) -> str | None:
    """Why Inductor could not lower an emitted call: it brings its inputs into an order of strides that only the program's data decide.

    torch 2.11 compares such strides when it lowers an operator that is tagged ``needs_fixed_stride_order``, and fails.
    """
    for node in emitter.nodes:
        if torch.Tag.needs_fixed_stride_order in getattr(node.target, "tags", ()):
            unknown = next((i for i in node.all_input_nodes if g.is_tensor(i) and g.hints(g.value(i).stride()) is None), None)
            if unknown is not None:
                return f"the strides of {g.describe(unknown)} are not known before run time (unbacked symbols)"
    return None


def difference(match: Match, new: tuple[fx.Node, ...], emitter: Emitter) -> str | None:
    """Why the nodes ``new`` may not take the place of the match's outputs; None if they may."""
    if len(new) != len(match.outputs):
        return f"{len(match.outputs)} outputs became {len(new)}"
    inside, emitted = set(match.nodes), set(emitter.nodes)
    same = next((n for n in new if n in inside), None)
    if same is not None:
        return f"it is {same.name}, which it replaces"
    inputs = {i for n in emitted for i in n.all_input_nodes} - emitted
    for node in inputs:
        if node in inside:
            return f"it uses {node.name}, which it replaces"
    for node in emitter.nodes:
        if g.is_mutating(node):
            return f"{g.describe(node)} writes to memory that others may read"
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return f"{g.describe(node)} draws random numbers"
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
    return _aliasing_difference(match.outputs, new, ({*inputs, *new} - emitted))


def _aliasing_difference(outputs: tuple[fx.Node, ...], new: tuple[fx.Node, ...], given: set[fx.Node]) -> str | None:
    """How the nodes ``new`` share memory otherwise than ``outputs``, in whose place they are, with one another or with ``given``.

    Args:
        given: nodes that are read, or that are returned unchanged, and so read by whoever reads the output.
    """
    memory = {n: g.memory_of(g.value(n)) for n in (*outputs, *new, *given)}
    firsts: dict[tuple[bool, int | None], fx.Node] = {}  # the first output in each memory, of the originals and of the replacements
    for old, replacement in zip(outputs, new):
        for node in given:
            if memory[node] is not None and (memory[node] == memory[old]) != (memory[node] == memory[replacement]):
                return f"it and the original differ in whether the output aliases {node.name}"
        before = old if memory[old] is None else firsts.setdefault((False, memory[old]), old)
        after = old if memory[replacement] is None else firsts.setdefault((True, memory[replacement]), old)
        if before is not after:
            return f"it and the original differ in whether the outputs {min(before, after).name} and {old.name} share memory"
    return None


def needs_gradients(match: Match, new: tuple[fx.Node, ...]) -> str | None:
    """Why the nodes ``new`` may not take the place of the outputs of ``match`` in a joint graph; None if they may.

    What a forward returns is computed before there are any gradients.
    """
    graph = match.outputs[0].graph
    found = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    early = next((old for old, replacement in zip(match.outputs, new) if replacement in found and old not in found), None)
    return None if early is None else f"it computes {early.name}, which the forward returns, from gradients"


def mutated_input(emitter: Emitter) -> str | None:
    """Why a replacement in a joint graph may not read what it reads; None if it may.

    An original whose backward reads only what was computed from an input does not mind that the program mutates the input afterwards. A
    replacement that reads the input itself, to compute that again, would read the new values.
    """
    emitted = set(emitter.nodes)
    mutated = next((i for n in emitter.nodes for i in n.all_input_nodes if i not in emitted and g.is_mutated_input(i)), None)
    return None if mutated is None else f"it reads {mutated.name}, which the program mutates later on"
