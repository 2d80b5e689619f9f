"""What attention makes a CPU do: PyTorch's kernel, and the products and loops that it is written out as."""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import Dim, leaves
from fusebackend.patterns.attention.emit import Site
from fusebackend.patterns.attention.inductor_patterns import is_taken_by_inductor
from fusebackend.patterns.sdpa.masks import Known
from fusebackend.rewriting.pattern import Estimate, Match, Work, Workload
from fusebackend.rewriting.workload import alignment, log2, streamed

#: How many keys PyTorch's kernel takes at a time, and how many queries, by the least number of all queries.
_KEYS, _QUERIES = 512, ((768, 256), (192, 64), (0, 32))


def estimate(match: Match) -> Estimate | Workload:
    """The work of an attention both ways."""
    site: Site
    known: Known
    site, known = match.site
    sizes = _sizes(site)
    if sizes is None:
        return Estimate(None, "a size depends on data, so it is not known whether PyTorch's attention pays", "unmeasured")
    if is_taken_by_inductor(match):
        return Estimate(False, "Inductor calls PyTorch's attention here itself")
    ours = [_flash(site, known, sizes)]
    if site.forward.scores.gain is not None:
        heads, queries, _, depth = sizes
        ours.append(streamed(2.0 * heads * queries * depth * site.forward.dtype.itemsize, g.value(site.queries.node)))
    return Workload(tuple(ours), (_written_out(site, sizes),))


def _sizes(site: Site) -> tuple[int, int, int, int] | None:
    """(heads of all batches, queries, keys, D)."""
    forward = site.forward
    dims: tuple[Dim, ...] = (forward.batch, forward.rows, forward.columns, forward.depth)
    found = [g.hints([axis.size for axis in leaves(dim)]) for dim in dims]
    if any(sizes is None for sizes in found):
        return None
    heads, queries, keys, depth = (math.prod(sizes or ()) for sizes in found)
    return heads, queries, keys, depth


def _flash(site: Site, known: Known, sizes: tuple[int, int, int, int]) -> Work:
    """PyTorch's kernel: threads take blocks of queries of a head."""
    heads, queries, keys, depth = sizes
    block = min(next(size for least, size in _QUERIES if queries >= least), queries)
    rows = [min(block, queries - first) for first in range(0, queries, block)]
    seen = [min(keys, first + n) if known.causal else keys for first, n in zip(range(0, queries, block), rows)]
    blocks = [-(-n // _KEYS) for n in seen]
    scores = heads * sum(n * min(keys, _KEYS * count) for n, count in zip(rows, blocks))
    items = heads * len(rows)
    threads = torch.get_num_threads()
    uneven = -(-items // threads) * threads / items
    quantities = {
        f"flops in {_bits(site)} bits": uneven * 4.0 * scores * depth,
        "scores": uneven * scores,
        "products": uneven * heads * sum(blocks) * 2,
        **_memory(site, sizes),
    }
    shape = {**_shape(site, sizes), "causal": float(known.causal), "masked": float(not (known.nothing or known.causal))}
    return Work("sdpa cpu", quantities, shape)


def _written_out(site: Site, sizes: tuple[int, int, int, int]) -> Work:
    """Products by a library, with scores and probabilities in memory, and loops between."""
    heads, queries, keys, depth = sizes
    scores = heads * queries * keys
    quantities = {
        f"flops in {_bits(site)} bits": 4.0 * scores * depth,
        "scores": float(scores),
        "score bytes": float(scores * site.forward.dtype.itemsize),
        **_memory(site, sizes),
    }
    return Work("softmax attention cpu", quantities, {**_shape(site, sizes), "addends": float(len(site.addends))})


def _bits(site: Site) -> int:
    return 8 * site.forward.dtype.itemsize


def _memory(site: Site, sizes: tuple[int, int, int, int]) -> dict[str, float]:
    heads, queries, keys, depth = sizes
    operands = heads * depth * (2 * queries + 2 * keys) * site.forward.dtype.itemsize
    masks = sum(math.prod(_hint(dim) for dim in site.scores_layout_of(addend)) for addend in site.addends)
    return {"bytes": float(operands), "mask bytes": float(4 * masks)}


def _hint(dim: Dim) -> int:
    return math.prod(g.hint(axis.size) or 1 for axis in leaves(dim))


def _shape(site: Site, sizes: tuple[int, int, int, int]) -> dict[str, float]:
    heads, queries, keys, depth = sizes
    dtype = site.forward.dtype
    return {
        "log2 heads": log2(heads),
        "log2 queries": log2(queries),
        "log2 keys": log2(keys),
        "log2 depth": log2(depth),
        "depth alignment": alignment(dtype.itemsize * depth),
        "keys alignment": alignment(dtype.itemsize * keys),
        "log2 itemsize": log2(dtype.itemsize),
        "float16": float(dtype == torch.float16),
        "dynamic": float(any(not isinstance(s, int) for s in g.value(site.forward.product).shape)),
    }
