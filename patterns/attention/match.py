"""Finds attention, ``softmax(scale * q @ k.mT + biases) @ v``, in whatever way it is written.

Matched before forward and backward are partitioned (joint level): the backward of the replacement needs neither scores nor probabilities.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.biases import Addend, addends, hides_nothing, hiding_of
from fusebackend.patterns.attention.emit import Site, batch_dims, emit
from fusebackend.patterns.attention.estimate import workload
from fusebackend.patterns.attention.facts import attended, computed_terms, factored_gradients, passes
from fusebackend.patterns.attention.gradients import Backward, BiasGradient, read_backward
from fusebackend.patterns.attention.inductor_patterns import is_taken_by_inductor
from fusebackend.patterns.attention.known_masks import without_causal_masks
from fusebackend.patterns.attention.numbers import is_purely_learned
from fusebackend.patterns.attention.ops import unavailable
from fusebackend.patterns.attention.scores import Mask
from fusebackend.patterns.attention.site import DTYPES, Forward, Result, read_forward
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class Attention(Pattern):
    """Attention that is written out, with any biases and masks, forward and backward together."""

    name = "attention"
    anchors = (aten.exp.default, aten._softmax.default)
    level = "joint"

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read_site(node)
        if not isinstance(site, Site):
            return site
        unlike = None if site.backward is None else _why_gradients_differ(site.forward, site.backward)
        if unlike is not None:
            return unlike
        site = without_causal_masks(site)
        device = g.value(site.forward.product).device
        no_kernel = unavailable(device)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")

        def build(emitter: Emitter) -> Sequence[fx.Node]:
            return emit(emitter, site)

        interior = read_interior(site)
        return interior if isinstance(interior, Reject) else Match(site.outputs, build, interior, describe_biases(site), site=site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        # In fp32 between the operands and the result: where eager mode rounds to 16 bits between, results are not to be compared.
        def biased(q, k, v, bias):
            return (((q.float() * 0.25) @ k.float().transpose(-1, -2) + bias).softmax(-1) @ v.float()).to(q.dtype)

        def masked(q, k, v, hidden):
            scores = (q.float() @ k.float().transpose(-1, -2) / 4).masked_fill(hidden, float("-inf"))
            return (scores.softmax(-1) @ v.float()).to(q.dtype)

        hidden = torch.ones(9, 13, dtype=torch.bool).triu(1)
        found: list[tuple[Callable, tuple]] = []
        for dtype in DTYPES:
            operands = tuple(torch.randn(2, 3, length, 16).to(dtype) for length in (9, 13, 13))
            found += [(biased, (*operands, torch.randn(3, 9, 13).to(dtype))), (masked, (*operands, hidden))]
        return found

    def estimate(self, match: Match) -> Estimate | Workload:
        site: Site = match.site
        facts = attended(site)
        if facts is None:
            return Estimate(None, "a size depends on data, so it is not known whether the kernels pay", "unmeasured")
        if not facts.biases and is_taken_by_inductor(match):
            return Estimate(None, "Inductor calls PyTorch's attention here itself, and how long that takes is not known", "unmeasured")
        factored = factored_gradients(site, match.nodes)
        nodes = [node for node in match.nodes if node not in factored]
        return workload(facts, passes(site, facts), site.backward is not None, nodes, computed_terms(site, match.nodes))


def read_site(anchor: fx.Node, dtypes: Sequence[torch.dtype] = DTYPES, most_batch_dims: int = 3) -> Site | Reject | None:
    """The attention whose softmax has its exponential at ``anchor``; why it is not replaced; or None if there is none.

    Args:
        dtypes: what the operators take: the first of the queries' dtypes, from the product back, that is among them.
        most_batch_dims: before queries and keys, 2 or 3.
    """
    forward = read_forward(anchor, dtypes)
    if not isinstance(forward, Forward):
        return forward
    backward = read_backward(forward)
    if isinstance(backward, Reject):
        return backward
    dtype = forward.dtype
    if not all(isinstance(axis.size, int) for axis in (*forward.depth, *forward.width)):
        return Reject("the size of a head is symbolic: kernels are compiled for some sizes", forward.scores.product)
    added = addends(forward.scores.terms)
    if isinstance(added, Reject):
        return added
    found = _slots(added, backward)
    if isinstance(found, Reject):
        return found
    added, slots = found
    lowered = None if forward.softmax.is_shifted else _may_lower_a_row(added)
    if lowered is not None:
        return lowered
    queries = backward.query_source if backward is not None else None
    keys = backward.key_source if backward is not None else None
    queries = queries or next(iter(forward.queries.sources(dtype, scaled=True)), None)
    keys = keys or next(iter(forward.keys.sources(dtype, scaled=True)), None)
    values = next(iter(forward.values.sources(dtype, scaled=False)), None)
    if queries is None or keys is None or values is None:
        found = sorted({str(g.value(o.node).dtype) for o in (forward.queries, forward.keys, forward.values)})
        return Reject(f"queries, keys and values of {', '.join(found)}: all {dtype} is supported", forward.scores.product)
    grad = None
    if backward is not None:
        grads = backward.grad.sources(dtype, scaled=False)
        if not grads:
            return Reject(f"a {g.value(backward.grad.node).dtype} gradient of a {dtype} result", backward.grad.node)
        grad = grads[0]
    batch = batch_dims(forward, tuple(added), queries, most_batch_dims)
    scale = forward.scores.scale * queries.factor * keys.factor
    return Site(forward, backward, queries, keys, values, grad, scale, batch, tuple(added), tuple(slots))


def _may_lower_a_row(added: Sequence[Addend]) -> Reject | None:
    """A reason where something may make all scores of a row so low that their exponentials are 0, but not -inf, which is NaN either way."""
    for addend in added:
        for term in addend.terms:
            hides = not math.isinf(term.fill) if isinstance(term, Mask) else not hides_nothing(term.node)
            if hides:
                reason = "a softmax from which no maximum is subtracted, beside what may hide: of rows that are hidden wholly it is NaN"
                return Reject(reason, term.node, "illegal")
    return None


def _why_gradients_differ(forward: Forward, backward: Backward) -> Reject | None:
    """A mask that fills in a finite number has no gradient where it hides; what is added to all keys of a row has. They differ in rows that
    are hidden wholly, which are known where nothing else hides. Under -inf, all gradients of such rows are NaN here; in eager mode those of
    the values are."""
    finite = next((m for m in forward.masks if not math.isinf(m.fill)), None)
    if finite is None:
        if forward.masks and not forward.softmax.is_safe and backward.values is None:
            reason = "the gradient of a mask that fills in -inf, without that of the values: of rows that are hidden wholly it would be NaN"
            return Reject(reason, forward.masks[0].node, "illegal")
        return None
    terms = [term for term in forward.scores.terms if term is not finite]
    others = [Addend((term,)) for term in terms if not hides_nothing(term.node)]
    learned = collections.Counter(b.axes for b in backward.biases)
    unlearned = [a for a in others if not _has_axes_of(a, learned) or not is_purely_learned(a.terms[0].node)]
    if finite is not forward.scores.terms[-1] or unlearned or len(others) > learned.total():
        reason = f"the gradient of a mask that fills in {finite.fill}, beside what may hide too: rows that are hidden wholly would differ"
        return Reject(reason, finite.node, "illegal")
    return None


def _has_axes_of(addend: Addend, gradients: collections.Counter) -> bool:
    return gradients[addend.axes] > 0 or gradients[dataclasses.replace(addend, expanded=True).axes] > 0


def _slots(added: list[Addend], backward: Backward | None) -> tuple[list[Addend], tuple[int, ...]] | Reject:
    """(the addends, to which of them each of the backward's bias gradients belongs): the smallest that has its axes."""
    gradients = backward.biases if backward is not None else ()
    added = list(added)
    whole = [dataclasses.replace(addend, expanded=True) for addend in added]
    for addend in (*added, *whole):
        addend.axes  # noqa: B018  (reading them may split axes, of which others are then compared)
    for gradient in gradients:
        if _holder(added, gradient) is None:
            slot = _holder(whole, gradient)
            if slot is None:
                node = gradient.result.node
                return Reject(f"the gradient of the scores at {node.name} is used otherwise than as that of a bias", node)
            added[slot] = whole[slot]
    slots = tuple(slot for gradient in gradients if (slot := _holder(added, gradient)) is not None)
    return [dataclasses.replace(a, learned=i in slots) for i, a in enumerate(added)], slots


def _holder(added: list[Addend], gradient: BiasGradient) -> int | None:
    """The smallest addend that has the gradient's axes, if possible no mask. Gradients of the same axes are one sum."""
    fitting = [i for i, addend in enumerate(added) if addend.axes >= gradient.axes]
    return min(fitting, key=lambda i: (len(added[i].axes), hiding_of(added[i]) is not None), default=None)


def read_interior(site: Site) -> tuple[fx.Node, ...] | Reject:
    """What the replacement makes unnecessary; or which other node uses the scores or the probabilities."""
    forward, backward = site.forward, site.backward
    needed = {*forward.needed, *forward.held, *forward.multiplied}
    masks = set(forward.dropout.converted if forward.dropout is not None else ())
    if backward is not None:
        needed |= set(backward.needed)
        masks |= set(backward.masks)
    passed = set[fx.Node]()
    for result, output in zip(site.results, site.outputs):
        passed |= {result.node, *result.passed}
        passed |= _until(result, output)
    outputs = set(site.outputs)
    inside = needed | passed | outputs
    for node in sorted(masks, reverse=True):  # of which something else may be computed too
        if all(u in inside for u in node.users):
            inside.add(node)
    for node in sorted((needed | passed) - outputs):
        user = next((u for u in node.users if u not in inside), None)
        if user is not None:
            what = "probabilities" if node in forward.held else "scores, or their gradient,"
            return Reject(f"{g.describe(user)} also uses the {what} at {node.name}", user, "illegal")
    return tuple(sorted(inside - outputs))


def _until(result: Result, output: fx.Node) -> set[fx.Node]:
    """The views and copies before ``output``."""
    found = set[fx.Node]()
    for node, _ in result.further:
        if node is output:
            return found
        found.add(node)
    return set()


def describe_biases(site: Site) -> str:
    count = len(site.addends)
    what = "without a bias" if not count else f"with {count} bias{'es' if count > 1 else ''}"
    learned = sum(i in site.slots for i in range(count))
    what += f", {learned} of them with a gradient" if learned else ""
    return f"causal, {what}" if site.causal else what
