"""Long sums as many short ones: a matrix product for each chunk of the terms, and the sum of their results.

A matrix product adds one term after another, so that its error grows with their number; a sum adds in a tree. Chunks are short, and the sum
over them is a sum again: in groups on a CPU, where Inductor adds one after another, too.
"""

from __future__ import annotations

import dataclasses

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.factors import Factor, Folded, Split
from fusebackend.patterns.contraction.sites import Site

#: Terms of a chunk in fp32 at most, and of a sum that is not divided: added one after another they have the error of a short sum in a tree.
MOST_IN_SEQUENCE = 17
#: Of a sum of more than ``MANY`` terms, whose error in a tree is that of about so many one after another.
_MOST_OF_MANY = 32
#: Terms. In fp64, and where eager mode rounds each product to 16 bits, only more than these are divided.
MANY = 1024
#: Terms of a chunk at least: of shorter ones there are as many results as terms.
_LEAST_CHUNKED = 4
#: Chunks whose results are added one after another on a CPU.
_GROUP = 8
_UNLIMITED = 1 << 62


def most_in_sequence(site: Site) -> int:
    """How many terms one matrix product may add."""
    if site.dtype.itemsize <= 2:
        return _UNLIMITED
    rounds_less = site.dtype == torch.float64 or g.value(site.product).dtype.itemsize <= 2
    return MANY if rounds_less else MOST_IN_SEQUENCE


def in_chunks(site: Site) -> Site | None:
    """``site`` with its terms in chunks of dims of known size; None if these have no divisors that would do."""
    sizes = site.sizes
    assert sizes is not None
    most = _MOST_OF_MANY if site.count(site.summed) > MANY else MOST_IN_SEQUENCE
    inner: list[int] = []
    outer: list[int] = []
    terms, split = 1, None
    for dim in reversed(site.summed):  # the innermost first
        size = site.shape[dim]
        if isinstance(size, int) and split is None and terms * size <= most:
            inner.insert(0, dim)
            terms *= size
            continue
        outer.insert(0, dim)
        length = _divisor(size, most // terms) if isinstance(size, int) and split is None else None
        if length is not None:
            split = Split(dim, length, len(sizes))
            inner.insert(0, split.inner)
            terms *= length
    if terms < _LEAST_CHUNKED:
        return None
    x, y = (site.x, site.y) if split is None else (_divided(factor, split) for factor in (site.x, site.y))
    return dataclasses.replace(site, x=x, y=y, summed=tuple(inner), chunked=tuple(outer), split=split, undivided=site)


def groups_of_chunks(site: Site) -> list[tuple[int, int]]:
    """In which steps the chunks' results are added, as (groups, results of each), of which the last group may have fewer; empty if at
    once."""
    chunks = [site.shape[d] for d in site.chunked]
    if site.device.type != "cpu" or not all(isinstance(n, int) for n in chunks):
        return []
    count, steps = site.count(site.chunked), []
    while count > _GROUP:
        steps.append((-(-count // _GROUP), _GROUP))
        count = steps[-1][0]
    return [*steps, (1, count)] if steps else []


def _divisor(size: int, most: int) -> int | None:
    """The largest divisor up to ``most``, above 1; None if there is none."""
    return next((n for n in range(min(most, size - 1), 1, -1) if size % n == 0), None)


def _divided(factor: Factor | Folded, split: Split) -> Factor | Folded:
    if isinstance(factor, Folded):
        return Folded(tuple(_divided_factor(part, split) for part in factor.parts))
    return _divided_factor(factor, split)


def _divided_factor(factor: Factor, split: Split) -> Factor:
    return factor.divided(split) if split.dim in factor.dims else factor
