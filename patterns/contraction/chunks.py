"""Long sums as many short ones: a matrix product for each chunk of the terms, and the sum of their results.

A matrix product adds one term after another, so that its error grows with their number; a sum adds in a tree. Chunks are short, and the sum
over them is a sum again.
"""

from __future__ import annotations

import dataclasses

from fusebackend.patterns.contraction.factors import Factor, Folded, Split
from fusebackend.patterns.contraction.sites import Site

#: Terms of a chunk at most: about as many as are added one after another with the error of a long sum in a tree.
MOST_CHUNKED = 32
#: And at least: of shorter chunks there are as many results as terms.
_LEAST_CHUNKED = 8


def in_chunks(site: Site) -> Site | None:
    """``site`` with its terms in chunks of dims of known size; None if these have no divisors that would do."""
    sizes = site.sizes
    assert sizes is not None
    inner: list[int] = []
    outer: list[int] = []
    terms, split = 1, None
    for dim in reversed(site.summed):  # the innermost first
        size = site.shape[dim]
        if isinstance(size, int) and split is None and terms * size <= MOST_CHUNKED:
            inner.insert(0, dim)
            terms *= size
            continue
        outer.insert(0, dim)
        length = _divisor(size, MOST_CHUNKED // terms) if isinstance(size, int) and split is None else None
        if length is not None:
            split = Split(dim, length, len(sizes))
            inner.insert(0, split.inner)
            terms *= length
    if terms < _LEAST_CHUNKED:
        return None
    x, y = (site.x, site.y) if split is None else (_divided(factor, split) for factor in (site.x, site.y))
    return dataclasses.replace(site, x=x, y=y, summed=tuple(inner), chunked=tuple(outer), split=split, undivided=site)


def _divisor(size: int, most: int) -> int | None:
    """The largest divisor up to ``most``, above 1; None if there is none."""
    return next((n for n in range(min(most, size - 1), 1, -1) if size % n == 0), None)


def _divided(factor: Factor | Folded, split: Split) -> Factor | Folded:
    if isinstance(factor, Folded):
        return Folded(tuple(_divided_factor(part, split) for part in factor.parts))
    return _divided_factor(factor, split)


def _divided_factor(factor: Factor, split: Split) -> Factor:
    return factor.divided(split) if split.dim in factor.dims else factor
