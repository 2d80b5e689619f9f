"""What an estimate needs to know of a site: sizes, biases, memory."""

from __future__ import annotations

import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.biases import Addend, dtype_of
from fusebackend.patterns.attention.dims import Dim, leaves, product
from fusebackend.patterns.attention.emit import Site, padded_size
from fusebackend.patterns.attention.scores import Bias
from fusebackend.patterns.attention.work import Attended, BiasFacts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import streamed

aten = torch.ops.aten

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
        causal=False,
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


def gathered_term(site: Site) -> fx.Node | None:
    """A node that gathers an element for each score, for a term of the scores. Inductor computes it inside its softmax, in each of its
    loops over a row, of which there are up to three."""
    scores = g.value(site.forward.scores.product).numel()
    stack = [term.node for addend in site.addends for term in addend.terms if isinstance(term, Bias)]
    seen = set(stack)
    while stack and len(seen) < _MOST_SEARCHED:
        node = stack.pop()
        if node.target is aten.gather.default and g.same_size(g.value(node).numel(), scores):
            return node
        if g.is_view(node) or g.is_fusable(node):
            earlier = [n for n in node.all_input_nodes if n not in seen and g.is_tensor(n)]
            stack += earlier
            seen.update(earlier)
    return None


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
