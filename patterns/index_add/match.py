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

Sums of one graph that go by the same index, as the layers of a graph network do, share one sort of it (shared_sort.py). The
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
from fusebackend.patterns.index_add.ops import DTYPES, HALVES, INDEX_ADD, INDEX_ADD_, INDEX_ADD_ZEROS, KERNELS, WRAP, max_dims
from fusebackend.patterns.index_add.sites import READERS, Site, is_accepted_alpha, only_user, read
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject

aten = torch.ops.aten

# PyTorch's index_put sums 16-bit slices of up to so many elements in fp32, and so do we.
MAX_EAGER_FP32_SLICE = 32


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
            if only_user(site.self) is node:
                site.interior.append(site.self)
        sharing = profit.sums_to_sort_for(site)
        if sharing:
            site.notes.append("planned")
        return Match(
            outputs=(site.output,),
            emit=lambda e: _emit(e, site, deterministic, sharing),
            interior=tuple(n for n in dict.fromkeys(site.interior) if n is not site.output),
            note=", ".join(site.notes),
            site=site,
        )

    def estimate(self, match: Match) -> Estimate:
        return profit.estimate(match.site)


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
    if not site.onto_zeros and _old_value_is_needed(site) and not _is_dense(target):
        return Reject("a copy of self is needed, and self has gaps in memory", site.self)
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    sizes, strides = g.hints(tensor.shape), g.hints(tensor.stride())
    if sizes is None or strides is None:
        return False
    return 0 in sizes or 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) == math.prod(sizes)


def _old_value_is_needed(site: Site) -> bool:
    """Whether self must be copied anyway; the operator then does that itself, and faster."""
    memory = g.through_views(site.self)
    if memory.op == "placeholder" and any(c.op == "output" for c in g.consumers(site.output)):
        return True  # otherwise the input itself would be returned, where the user gets a copy
    if any(n is not None and g.through_views(n) is memory for n in (site.values, site.weight, site.index, site.source_index)):
        return True
    later = [u for u in site.self.users if site.output < u]
    written_back = any(u.target is aten.copy_.default and u.args[0] is site.self for u in later)
    return not written_back and (bool(later) or site.self.op == "placeholder")


def _is_summed_in_fp32_eagerly(site: Site) -> bool:
    sizes = g.hints(g.value(site.self).shape[site.dim + 1 :])
    return site.bounds == WRAP and sizes is not None and math.prod(sizes) <= MAX_EAGER_FP32_SLICE


def _emit(e: Emitter, site: Site, deterministic: bool, sharing: list[Site]) -> fx.Node:
    values, weight = site.values, site.weight
    sorted_index = shared_sort.emit_sorted_index(e, site, sharing) if sharing else None
    if sorted_index is not None and shared_sort.is_count(site):
        return shared_sort.emit_count(e, site, sorted_index)
    if values.target is aten.full.default and site.index_dims == 1:
        # Of a constant, the kernel needs one element, expanded.
        one = e.call(aten.full.default, [1] * g.value(values).dim(), *values.args[1:], **values.kwargs)
        values = e.call(aten.expand.default, one, values.args[0])
    if site.index_dims != 1:
        shape = list(g.value(site.self).shape)
        shape[site.dim] = site.entries if isinstance(site.entries, int) else -1
        values = e.call(aten.reshape.default, values, shape)

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
        "precise": site.rounded_once or (g.value(values).dtype in HALVES and _is_summed_in_fp32_eagerly(site)),
        "deterministic": deterministic,
        "plan": sorted_index,
    }
    if site.onto_zeros:
        return e.call(INDEX_ADD_ZEROS, site.self.args[0][site.dim], *options.values())
    if _old_value_is_needed(site):
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
