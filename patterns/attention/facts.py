"""What an estimate needs to know of a site: sizes, biases, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.biases import Addend, dtype_of
from fusebackend.patterns.attention.dims import Dim, is_cast, leaves, product
from fusebackend.patterns.attention.emit import Site, padded_size
from fusebackend.patterns.attention.numbers import scaling
from fusebackend.patterns.attention.scores import Bias
from fusebackend.patterns.attention.work import Attended, BiasFacts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import streamed

_MOST_SEARCHED = 60  # nodes


def attended(site: Site) -> Attended | None:
    """The attention as the operators take it; None if a size depends on data."""
    forward = site.forward
    dims = (*site.batch, forward.rows, forward.columns, forward.depth, forward.width)
    sizes = [product(axis.size for axis in leaves(dim)) for dim in dims]
    known = g.hints(sizes)
    if known is None:
        return None
    if len(site.batch) == 2:
        known.insert(1, 1)
    b, inner, heads, queries, keys, *widths = known
    depth, width = map(padded_size, widths)
    return Attended(
        (b, inner, heads, queries, keys, depth, width),
        [_bias(site, i, addend) for i, addend in enumerate(site.addends)],
        causal=site.causal,
        device=g.value(forward.product).device,
        itemsize=forward.dtype.itemsize,
        drops=forward.dropout is not None,
        dynamic=not all(isinstance(size, int) for size in sizes),
    )


def passes(site: Site, facts: Attended) -> list[Work]:
    """What is moved before and behind the operators' kernels, at most: operands that are padded, or multiplied by a gain, and their
    gradients."""
    b, inner, heads, queries, keys, depth, width = facts.sizes
    of_queries, of_keys, of_values, of_result = queries * depth, keys * depth, keys * width, queries * width
    forward, passed = site.forward, list[int]()
    padded = [padded_size(size) != size for size in (product(a.size for a in dim) for dim in (forward.depth, forward.width))]
    passed += [of_queries, of_keys] if padded[0] else []
    passed += [of_values, of_result] if padded[1] else []
    gain = forward.scores.gain
    passed += [of_queries] if gain is not None else []
    passed *= 1 if site.backward is None else 2  # the gradients
    if gain is not None and site.backward is not None and site.backward.gain is not None:
        passed.append(of_queries)
    like = g.value(site.queries.node)
    return [streamed(2.0 * b * inner * heads * size * facts.itemsize, like) for size in passed]


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of the scores that are computed for them alone: gathered, looked up, added up.

    Attributes:
        nodes: what computes them, with the views between. Inductor runs it inside its softmax, in each of its loops over a row.
        stored: those of the nodes that compute what the operator reads, before that is expanded.
        gather: whether an element is gathered for each score.
    """

    nodes: tuple[fx.Node, ...]
    stored: tuple[fx.Node, ...]
    gather: bool


def computed_terms(site: Site, matched: Sequence[fx.Node]) -> Terms | None:
    """The terms of the scores that nothing but the ``matched`` nodes read, and that are more than views."""
    terms = [(addend, term) for addend in site.addends for term in addend.terms if isinstance(term, Bias)]
    nodes = _only_for(set(matched), [term.node for _, term in terms])
    stored = _only_for(set(matched) | nodes, [addend.source_of(term)[0] for addend, term in terms]) & nodes
    if not any(map(g.is_fusable, stored)):
        return None
    scores = g.value(site.forward.scores.product).numel()
    gather = any(n.target is torch.ops.aten.gather.default and g.same_size(g.value(n).numel(), scores) for n in stored)
    return Terms(tuple(sorted(nodes)), tuple(sorted(stored)), gather)


def _only_for(readers: set[fx.Node], ends: list[fx.Node]) -> set[fx.Node]:
    """What is computed for ``ends``, in loops that Inductor generates, and read by the ``readers`` alone."""
    found = set[fx.Node]()
    while ends and len(found) < _MOST_SEARCHED:
        ends.sort()
        node = ends.pop()  # those behind it, which may read it, were looked at
        if node not in found and (g.is_view(node) or g.is_fusable(node)) and all(u in readers or u in found for u in node.users):
            found.add(node)
            ends += [n for n in node.all_input_nodes if g.is_tensor(n)]
    return found


def factored_gradients(site: Site, matched: Sequence[fx.Node]) -> set[fx.Node]:
    """The ``matched`` nodes that multiply the gradient of the scores by a number for that of a bias, which loops read: in either form
    Inductor computes them there."""
    inside, found = set(matched), set[fx.Node]()
    for gradient in site.backward.biases if site.backward is not None else ():
        node, path, factored = gradient.result.node, list[fx.Node](), 0
        while g.is_read_by_loops(gradient.result.node) and not any(u in inside and u not in found and u not in path for u in node.users):
            scaled = scaling(node)
            if scaled is None and not (g.is_view(node) or is_cast(node)):
                break
            path.append(node)
            factored = factored if scaled is None else len(path)
            node = scaled[0] if scaled is not None else node.all_input_nodes[0]
        found.update(path[:factored])
    return found


def _bias(site: Site, index: int, addend: Addend) -> BiasFacts:
    sizes = [_hint(dim) for dim in site.scores_layout_of(addend)]
    if len(site.batch) == 2:
        sizes.insert(1, 1)
    itemsize = dtype_of(addend, site.forward.dtype).itemsize
    b, inner, heads, queries, keys = sizes
    gradient = 0 if index not in site.slots else 4 if index in site.wide_slots else itemsize
    return BiasFacts((b, inner, heads, queries, keys), itemsize, keys * itemsize % 16 == 0, gradient)


def _hint(dim: Dim) -> int:
    return math.prod(g.hint(axis.size) or 1 for axis in leaves(dim))
