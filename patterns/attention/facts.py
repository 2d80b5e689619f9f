"""What an estimate needs to know of a site: sizes, biases, memory."""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.biases import Addend, dtype_of
from fusebackend.patterns.attention.dims import Dim, leaves, product
from fusebackend.patterns.attention.emit import Site
from fusebackend.patterns.attention.scores import Bias
from fusebackend.patterns.attention.work import Attended, BiasFacts


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
    b, inner, heads, queries, keys, depth, width = known
    return Attended(
        (b, inner, heads, queries, keys, depth, width),
        [_bias(site, i, addend) for i, addend in enumerate(site.addends)],
        causal=False,
        device=g.value(forward.product).device,
        itemsize=forward.dtype.itemsize,
        dynamic=not all(isinstance(size, int) for size in sizes),
    )


def _bias(site: Site, index: int, addend: Addend) -> BiasFacts:
    sizes = [_hint(dim) for dim in site.scores_layout_of(addend)]
    if len(site.batch) == 2:
        sizes.insert(1, 1)
    has_gradient = index in site.slots
    itemsize = dtype_of(addend, site.forward.dtype, wide=index in site.wide_slots).itemsize
    b, inner, heads, queries, keys = sizes
    return BiasFacts((b, inner, heads, queries, keys), itemsize, _has_aligned_rows(site, addend, keys * itemsize), has_gradient)


def _hint(dim: Dim) -> int:
    return math.prod(g.hint(axis.size) or 1 for axis in leaves(dim))


def _has_aligned_rows(site: Site, addend: Addend, row_bytes: int) -> bool:
    """Whether each row is contiguous and begins at a multiple of 16 bytes."""
    columns = site.forward.columns
    if row_bytes % 16 or not columns:
        return False
    term = addend.terms[0]
    if len(addend.terms) > 1 or not isinstance(term, Bias):
        return True  # it is computed
    node, dims = addend.source_of(term)
    value: torch.Tensor = g.value(node)
    innermost = [leaves(dim)[-1] for dim in dims if dim and leaves(dim)]
    strides = [stride for dim, stride in zip(dims, value.stride()) if dim and leaves(dim)]
    return any(axis is columns[-1] and g.same_size(stride, 1) for axis, stride in zip(innermost, strides))
