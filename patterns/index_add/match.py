"""Sums by index: ``index_add`` and its kin, with the scale, the gather and the zeros around them absorbed.

The backward of every embedding, ``index_select`` and ``x[idx]``, PyG's ``scatter_add`` and message passing are one
operation: rows of a source, perhaps gathered and weighted, are added to rows of an output. PyTorch and Inductor add each
element atomically (for a bf16 ``index_add`` Inductor also copies the whole tensor twice). The kernels here add whole vectors
atomically; sum few rows that take many entries in shared memory first; sort what there is much of into buckets of rows, so
that each row is written once; round 16-bit sums of many entries once; and do segmented sums by a stable sort for
``torch.use_deterministic_algorithms``.

    index_put(self, [None, idx], values, accumulate=True)         ->  index_add_(self, 1, idx, values)
    index_add(self, 0, idx, source, alpha=a)                      ->  index_add_(self, 0, idx, source, alpha=a)
    scatter_add(self, 0, expand(view(idx, [-1, 1])), source)      ->  index_add_(self, 0, idx, source)
    index_put(full(0), [dst], mul(index(x, [src]), unsqueeze(w, 1)), accumulate=True)
        ->  index_add_zeros(rows, 0, dst, x, weight=w, source_index=src)
    index_put(self, [src], gather(g, 0, expand(view(dst, [-1, 1]))), accumulate=True)
        ->  index_add_(self, 0, src, g, source_index=dst, bounds=WRAP + SOURCE_STRICT)
    _unsafe_masked_index_put_accumulate(full(0), 0 <= idx < rows & idx != pad, [idx], g)
        ->  index_add_zeros(rows, 0, idx, g, ignore_index=pad, bounds=DROP)

Sums of one graph that go by the same index, as the layers of a graph network do, may share one sort of it (shared_sort.py). The
operator is mutable and goes into the graph functionalised, so that self is updated in place wherever Inductor can prove that
nobody needs the old value: an ``index_add_`` on a graph input costs no copy. A 16-bit embedding's gradient, which PyTorch
sums in fp32, is summed in fp32 here too, without the fp32 tensors.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.index_add import estimate as profit
from fusebackend.patterns.index_add import shared_sort
from fusebackend.patterns.index_add.ops import DTYPES, INDEX_ADD, INDEX_ADD_, INDEX_ADD_ZEROS, KERNELS, max_dims
from fusebackend.patterns.index_add.sites import COPY, READERS, Site, is_accepted_alpha, read
from fusebackend.rewriting.emitted_sizes import merged
from fusebackend.rewriting.in_place import may_be_in_memory_of
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class IndexAdd(Pattern):
    """See the module's docstring."""

    name = "index_add"
    anchors = tuple(READERS)

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        refusal = _refusal(site)
        if refusal:
            return refusal
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic:
            site.notes.append("deterministic")
        if site.onto_zeros:
            site.notes.append("zeros")
            if g.only_user(site.self) is node:
                site.interior.append(site.self)
        site.sharing = shared_sort.sums_that_may_share(site)
        return _match(site, deterministic)

    def estimate(self, match: Match) -> Estimate | list[Workload]:
        alone = _match(match.site.alone(), torch.are_deterministic_algorithms_enabled()) if match.site.sharing else None
        return profit.estimate(match, alone)


def _match(site: Site, deterministic: bool) -> Match:
    return Match(
        outputs=(site.output,),
        emit=lambda e: _emit(e, site, deterministic),
        interior=tuple(n for n in dict.fromkeys(site.interior) if n is not site.output),
        note=", ".join([*site.notes, *(["planned"] if site.sharing else [])]),
        site=site,
    )


def _refusal(site: Site) -> Reject | None:
    """Why the kernels can't compute this."""
    target, source, result = g.value(site.self), g.value(site.values), g.value(site.output)
    reason = loader.load().why_not(target.device, *KERNELS)
    if reason:
        return Reject(reason, code="no_kernel")
    if result.dtype not in DTYPES:
        return Reject(f"dtype {str(result.dtype).removeprefix('torch.')} is not supported")
    if source.dtype != result.dtype:
        return Reject("self and source differ in dtype", site.values)
    if not isinstance(site.alpha, (int, float)) or not is_accepted_alpha(site.alpha):
        return Reject(f"alpha is {site.alpha}, not a number that a kernel can take")
    if target.dim() > max_dims():
        return Reject(f"{target.dim()} dimensions; up to {max_dims()} are accepted")
    if any(g.hint(stride) == 0 and g.hint(size) != 1 for stride, size in zip(target.stride(), target.shape)):
        return Reject("self is expanded", site.self)
    if {target.device} != {source.device, g.value(site.index).device}:
        return Reject("the tensors are on several devices")
    if site.start == COPY and not all(_is_dense(g.value(n)) for n in may_be_in_memory_of(site.self) if g.is_tensor(n)):
        return Reject("a copy of self is needed, and self has gaps in memory", site.self)
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    sizes, strides = g.hints(tensor.shape), g.hints(tensor.stride())
    if sizes is None or strides is None:
        return False
    return 0 in sizes or 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) == math.prod(sizes)


def _emit(e: Emitter, site: Site, deterministic: bool) -> fx.Node:
    values, weight = site.values, site.weight
    sorted_index = shared_sort.emit_sorted_index(e, site) if site.sharing else None
    if sorted_index is not None and shared_sort.is_count(site):
        return shared_sort.emit_count(e, site, sorted_index)
    if values.target is aten.full.default and site.index_dims == 1:
        # Of a constant, the kernel needs one element, expanded.
        one = e.call(aten.full.default, [1] * g.value(values).dim(), *values.args[1:], **values.kwargs)
        values = e.call(aten.expand.default, one, values.args[0])
    after = g.value(values).dim() - site.dim - site.index_dims
    values = merged(e, values, [*[1] * site.dim, site.index_dims, *[1] * after])

    def flat(vector: fx.Node | None) -> fx.Node | None:
        return vector if vector is None or g.value(vector).dim() == 1 else e.call(aten.reshape.default, vector, [-1])

    options = {
        "dim": site.dim,
        "index": flat(site.index),
        "source": values,
        "weight": flat(weight),
        "source_index": flat(site.source_index),
        "alpha": float(site.alpha),
        "ignore_index": site.ignore,
        "bounds": site.all_bounds,
        "precise": site.precise,
        "deterministic": deterministic,
        "plan": sorted_index,
    }
    if site.onto_zeros:
        return e.call(INDEX_ADD_ZEROS, site.self.args[0][site.dim], *options.values())
    if site.start == COPY:
        return e.call(INDEX_ADD, site.self, *options.values())
    # Inductor's reinplacing pass finds out whether self may be overwritten; otherwise it copies it.
    updated = e.call(
        torch.ops.higher_order.auto_functionalized_v2,
        INDEX_ADD_,
        **options,
        _self_base_index=0,
        _all_bases=[site.self],
    )
    return e.call(operator.getitem, updated, 1)
