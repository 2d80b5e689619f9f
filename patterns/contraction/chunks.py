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
#: Of a symbolic number of chunks so many steps at least are in groups: 1,000 results are added as 8, 8 and 16 are then.
_STEPS_OF_UNKNOWN = 2
_UNLIMITED = 1 << 62


def most_in_sequence(site: Site) -> int:
    """How many terms one matrix product may add."""
    if site.dtype.itemsize <= 2:
        return _UNLIMITED
    rounds_less = site.dtype == torch.float64 or g.value(site.product).dtype.itemsize <= 2
    return MANY if rounds_less else MOST_IN_SEQUENCE


def has_more_terms(site: Site, most: int) -> bool:
    """Whether the sum has more than ``most`` terms, or may have at a size that the graph was not traced with."""
    if site.sizes is None:
        return False
    is_known = most > MOST_IN_SEQUENCE or all(isinstance(site.shape[d], int) for d in site.summed)
    return not is_known or site.count(site.summed) > most


def in_chunks(site: Site) -> Site:
    """``site`` with its terms in chunks: of dims of known size, which are divided where they have divisors that would do, or of a dim that
    is padded with zeros."""
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
        length = _divisor(size, -(-_LEAST_CHUNKED // terms), most // terms) if isinstance(size, int) and split is None else None
        if length is not None:
            split = Split(dim, length, len(sizes))
            inner.insert(0, split.inner)
            terms *= length
    x, y = site.x, site.y
    if split is not None:
        x, y = _divided(x, split), _divided(y, split)
    elif terms < _LEAST_CHUNKED:
        # Zeros are the smallest part of the largest dim. A symbolic one is divided as if it were as large as when it was traced.
        dim = max(reversed(outer), key=lambda d: sizes[d])
        split = Split(dim, _length(sizes[dim], -(-_LEAST_CHUNKED // terms), most // terms), len(sizes))
        inner = [split.inner if d == dim else d for d in site.summed if d in (*inner, dim)]
        x, y = _padded(x, split), _padded(y, split)
    return dataclasses.replace(site, x=x, y=y, summed=tuple(inner), chunked=tuple(outer), split=split, undivided=site)


def groups_of_chunks(site: Site) -> list[tuple[int, int]]:
    """In which steps the chunks' results are added, as (groups, results of each), of which the last group may have fewer; empty if at
    once. Of chunks of symbolic number there may be many more than the hint says."""
    if site.device.type != "cpu":
        return []
    count, steps = site.count(site.chunked), list[tuple[int, int]]()
    least = 0 if all(isinstance(site.shape[d], int) for d in site.chunked) else _STEPS_OF_UNKNOWN
    while count > _GROUP or len(steps) < least:
        steps.append((-(-count // _GROUP), _GROUP))
        count = steps[-1][0]
    return [*steps, (1, count)] if steps else []


def _divisor(size: int, least: int, most: int) -> int | None:
    """The largest divisor from ``least``, or 2, to ``most``; None if there is none."""
    return next((n for n in range(min(most, size - 1), max(least, 2) - 1, -1) if size % n == 0), None)


def _length(size: int, least: int, most: int) -> int:
    """Of two or more chunks of up to ``most``, as few as can be: the least from ``least`` that suffices for ``size``."""
    chunks = max(-(-size // most), 2)
    return max(-(-size // chunks), least)


def _divided(factor: Factor | Folded, split: Split) -> Factor | Folded:
    if isinstance(factor, Folded):
        return dataclasses.replace(factor, parts=tuple(_divided_factor(part, split) for part in factor.parts))
    return _divided_factor(factor, split)


def _divided_factor(factor: Factor, split: Split) -> Factor:
    return factor.divided(split) if split.dim in factor.dims else factor


def _padded(factor: Factor | Folded, split: Split) -> Folded:
    return Folded(factor.parts if isinstance(factor, Folded) else (factor,), factor.dtype, split)
