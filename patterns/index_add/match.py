"""Accumulate by index: ``index_add`` and its kin, with the scale, the gather and the zeros around them absorbed.

The backward of every embedding, ``index_select`` and ``x[idx]``, PyG's ``scatter_add`` and message passing are one
operation: rows of a source, perhaps gathered and weighted, added to rows of an output. PyTorch and Inductor do it with
an atomic addition an element (for a bf16 ``index_add`` Inductor also copies the whole tensor twice). Here whole vectors
are reduced in one instruction, few rows that take many entries are summed in shared memory first, many rows with much
to read by buckets of rows (each row is then written once, without atomics), 16-bit sums of many entries are rounded
once, and ``torch.use_deterministic_algorithms`` gets a segmented sum over a stable sort.

    index_put(self, [None, idx], values, accumulate=True)         ->  index_add_(self, 1, idx, values)
    index_add(self, 0, idx, source, alpha=a)                      ->  index_add_(self, 0, idx, source, alpha=a)
    scatter_add(self, 0, expand(view(idx, [-1, 1])), source)      ->  index_add_(self, 0, idx, source)
    index_put(full(0), [dst], mul(index(x, [src]), unsqueeze(w, 1)), accumulate=True)
        ->  index_add_zeros(rows, 0, dst, x, weight=w, source_index=src)
    index_put(self, [src], gather(g, 0, expand(view(dst, [-1, 1]))), accumulate=True)
        ->  index_add_(self, 0, src, g, source_index=dst, bounds=WRAP + SOURCE_STRICT)
    _unsafe_masked_index_put_accumulate(full(0), 0 <= idx < rows & idx != pad, [idx], g)
        ->  index_add_zeros(rows, 0, idx, g, ignore_index=pad, bounds=DROP)

Sums of one graph that go by the same index, as the layers of a graph network do, share one sort of it
(index_add_plan.py): each row is then written once, without atomics. What is added to is updated in place wherever
Inductor can prove that nobody needs the old value: the op is mutable and goes into the graph functionalised, so an
``index_add_`` on a graph input costs no copy. A 16-bit embedding's gradient, which PyTorch sums in fp32, is summed in
fp32 here too, without the fp32 tensors.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.index_add import plan as index_add_plan
from fusebackend.patterns.index_add.ops import DTYPES, HALVES, INDEX_ADD, INDEX_ADD_, INDEX_ADD_ZEROS, KERNELS, WRAP
from fusebackend.patterns.index_add.sites import READERS, Site, only_user, read
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject

aten = torch.ops.aten


# ---- is it right, and does it pay? ----

# So many entries a row on average that atomic additions queue up, and the kernels sum in shared memory first.
CROWDED = 32

# Inductor reduces these in a kernel of its own. Of less, in bytes, launching is what takes the time, and an operator's call costs the
# CPU a microsecond more than a Triton kernel's.
INDUCTORS_OWN = {torch.float64, torch.float32, torch.float16}
LEAST_BYTES = 1 << 20

# So many additions to a few rows wait for each other longer than a launch takes.
MANY = 4096

# PyTorch's index_put sums 16-bit slices up to this size in fp32.
NARROW = 32


def _refusal(site: Site) -> Reject | None:
    """Why the kernels can't do this."""
    target, source, result = g.value(site.self), g.value(site.values), g.value(site.output)
    reason = loader.load().why_not(target.device, *KERNELS)
    if reason:
        return Reject(reason)
    if result.dtype not in DTYPES:
        return Reject(f"dtype {str(result.dtype).removeprefix('torch.')} is not supported")
    if source.dtype != result.dtype:
        return Reject("self and source differ in dtype", site.values)
    if (
        not isinstance(site.alpha, (int, float))
        or not math.isfinite(site.alpha)
        or abs(site.alpha) > 2**53
        or 0 < abs(site.alpha) < 2**-100
    ):
        return Reject(f"alpha is {site.alpha}, not a number that a kernel can take")
    if target.dim() > 9:
        return Reject(f"{target.dim()} dimensions; up to 9 are accepted")
    if any(g.hint(stride) == 0 and g.hint(size) != 1 for stride, size in zip(target.stride(), target.shape)):
        return Reject("self is expanded", site.self)
    if any(isinstance(size, int) and size == 0 for size in (*target.shape, *source.shape)):
        return Reject("an empty tensor: nothing to gain")
    if {target.device} != {source.device, g.value(site.index).device}:
        return Reject("the tensors are on several devices")
    return None


def _fused_away(site: Site, anchor: fx.Node) -> Reject | None:
    """Inductor computes a pointwise source inside its scatter loop; an opaque kernel needs it as a tensor first."""
    if g.value(site.self).device.type == "cpu":
        return None  # Inductor's scatter on a CPU is several times slower than ours
    if anchor.target is aten.index_add.default or g.value(anchor).dtype is torch.int64 or torch.are_deterministic_algorithms_enabled():
        return None  # those Inductor leaves to PyTorch
    producer = g.through_views(site.values)
    if site.source_index is not None or not g.is_fusable(producer) or producer.target is aten.full.default:
        return None
    if len(producer.users) > 1:
        return None  # it becomes a tensor anyway
    entries, rows = g.hint(g.value(site.index).numel()), g.hint(g.value(site.self).shape[site.dim])
    if entries is not None and rows is not None:
        if entries >= CROWDED * rows:
            return None
        if site.rounded_once and rows >= entries:
            return None  # two passes over an fp32 output are saved, more than the source's
    return Reject(
        f"Inductor computes {g.describe(producer)} inside its scatter: made a tensor it would cost more than is gained",
        producer,
    )


def _too_little(site: Site, anchor: fx.Node) -> Reject | None:
    """Whether a plain sum, which Inductor's kernel does as well, is so small that the call counts."""
    target, values = g.value(site.self), g.value(site.values)
    if target.device.type == "cpu" or target.dtype not in INDUCTORS_OWN or torch.are_deterministic_algorithms_enabled():
        return None
    if anchor.target is aten.index_add.default or site.onto_zeros or site.source_index is not None:
        return None
    entries, rows = g.hint(g.value(site.index).numel()), g.hint(target.shape[site.dim])
    numel = g.hint(values.numel())
    if None in (entries, rows, numel) or entries >= max(CROWDED * rows, MANY) or numel * values.itemsize >= LEAST_BYTES:
        return None
    return Reject("so few entries that launching is what takes the time, which is quicker for a kernel of Inductor's")


def _is_dense(tensor: torch.Tensor) -> bool:
    sizes, strides = g.hints(tensor.shape), g.hints(tensor.stride())
    return sizes is not None and strides is not None and 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) == math.prod(sizes)


def _is_narrow(site: Site) -> bool:
    shape = [g.hint(s) for s in g.value(site.self).shape[site.dim + 1 :]]
    return None not in shape and math.prod(shape) <= NARROW


class IndexAdd(Pattern):
    """See the module's docstring."""

    name = "index_add"
    anchors = tuple(READERS)

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read(node)
        if not isinstance(site, Site):
            return site
        refusal = _refusal(site) or _fused_away(site, node) or _too_little(site, node)
        if refusal:
            return refusal
        if not site.onto_zeros and _old_value_is_needed(site) and not _is_dense(g.value(site.self)):
            return Reject("a copy of self is needed, and self has gaps in memory", site.self)
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic:
            site.notes.append("deterministic")
        if site.onto_zeros:
            site.notes.append("zeros")
            if only_user(site.self) is node:
                site.interior.append(site.self)
        planned = index_add_plan.pays(site)
        if planned:
            site.notes.append("planned")
        interior = tuple(n for n in dict.fromkeys(site.interior) if n is not site.output)
        return Match(
            outputs=(site.output,),
            emit=lambda e: _emit(e, site, deterministic, planned),
            interior=interior,
            note=", ".join(site.notes),
        )


# ---- the replacement ----


def _emit(e: Emitter, site: Site, deterministic: bool, planned: bool) -> fx.Node:
    index, values, weight = site.index, site.values, site.weight
    plan = index_add_plan.shared(e, site) if planned else None
    if plan is not None and index_add_plan.is_count(site):
        return index_add_plan.count(e, site, plan)
    if values.target is aten.full.default and site.index_dims == 1:
        # A count: one element, expanded, is all that has to be read.
        one = e.call(aten.full.default, [1] * g.value(values).dim(), *values.args[1:], **values.kwargs)
        values = e.call(aten.expand.default, one, values.args[0])
    if site.index_dims != 1:
        shape = list(g.value(site.self).shape)
        shape[site.dim] = -1
        values = e.call(aten.reshape.default, values, shape)
    if g.value(index).dim() != 1:
        index = e.call(aten.reshape.default, index, [-1])
    if weight is not None and g.value(weight).dim() != 1:
        weight = e.call(aten.reshape.default, weight, [-1])
    source_index = site.source_index
    if source_index is not None and g.value(source_index).dim() != 1:
        source_index = e.call(aten.reshape.default, source_index, [-1])
    options = {
        "dim": site.dim,
        "index": index,
        "source": values,
        "weight": weight,
        "source_index": source_index,
        "alpha": float(site.alpha),
        "ignore_index": site.ignore,
        "bounds": site.all_bounds,
        "precise": site.rounded_once or (g.value(values).dtype in HALVES and site.bounds == WRAP and _is_narrow(site)),
        "deterministic": deterministic,
        "plan": plan,
    }
    if site.onto_zeros:
        return e.call(INDEX_ADD_ZEROS, site.self.args[0][site.dim], *options.values())
    if _old_value_is_needed(site):
        return e.call(INDEX_ADD, site.self, *options.values())
    # Mutable, but functionalised: Inductor's reinplacing pass settles whether self may be overwritten, else it copies.
    updated = e.call(
        torch.ops.higher_order.auto_functionalized_v2,
        INDEX_ADD_,
        **options,
        _self_base_index=0,
        _all_bases=[site.self],
    )
    return e.call(operator.getitem, updated, 1)


def _old_value_is_needed(site: Site) -> bool:
    """Whether self must be copied anyway; the op does that itself, and faster."""
    memory = g.through_views(site.self)
    if memory.op == "placeholder" and any(c.op == "output" for c in g.consumers(site.output)):
        return True  # else what is returned, a copy of the user's own, would be the input itself
    if any(n is not None and g.through_views(n) is memory for n in (site.values, site.weight, site.index, site.source_index)):
        return True
    later = [u for u in site.self.users if site.output < u]
    written_back = any(u.target is aten.copy_.default and u.args[0] is site.self for u in later)
    return not written_back and (bool(later) or site.self.op == "placeholder")
