"""Accumulate by index: ``index_add`` and its kin, with the scale, the gather and the zeros around them absorbed.

The backward of every embedding, ``index_select`` and ``x[idx]``, PyG's ``scatter_add`` and message passing are one
operation: rows of a source, perhaps gathered and weighted, added to rows of an output. PyTorch and Inductor do it with
an atomic addition an element (for a bf16 ``index_add`` Inductor also copies the whole tensor twice). Here whole vectors
are reduced in one instruction, few rows that take many entries are summed in shared memory first, 16-bit sums of many
entries are rounded once, and ``torch.use_deterministic_algorithms`` gets a segmented sum over a stable sort.

    index_put(self, [None, idx], values, accumulate=True)         ->  index_add_(self, 1, idx, values)
    index_add(self, 0, idx, source, alpha=a)                      ->  index_add_(self, 0, idx, source, alpha=a)
    scatter_add(self, 0, expand(view(idx, [-1, 1])), source)      ->  index_add_(self, 0, idx, source)
    index_put(full(0), [dst], mul(index(x, [src]), unsqueeze(w, 1)), accumulate=True)
        ->  index_add_zeros(rows, 0, dst, x, weight=w, source_index=src)
    _unsafe_masked_index_put_accumulate(full(0), 0 <= idx < rows & idx != pad, [idx], g)
        ->  index_add_zeros(rows, 0, idx, g, ignore_index=pad, bounds=DROP)

What is added to is updated in place wherever Inductor can prove that nobody needs the old value: the op is mutable and
goes into the graph functionalised, so an ``index_add_`` on a graph input costs no copy. A 16-bit embedding's gradient,
which PyTorch sums in fp32, is summed in fp32 here too, without the fp32 tensors.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from .. import graph as g
from .. import native, ops
from ..pattern import Emitter, Match, Pattern, Reject
from ..registry import register

aten = torch.ops.aten
prims = torch.ops.prims

#: An index outside [0, rows) is an error; counts from the end (index_put); adds nothing (embedding backward).
STRICT, WRAP, DROP = 0, 1, 2

_OPTIONS = (
    "int dim, Tensor index, Tensor source, Tensor? weight, Tensor? source_index, float alpha, int? ignore_index,"
    " int bounds, bool precise, bool deterministic"
)

DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
HALVES = {torch.float16, torch.bfloat16}


def reference(
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor | None = None,
    source_index: torch.Tensor | None = None,
    alpha: float = 1.0,
    ignore_index: int | None = None,
    bounds: int = STRICT,
) -> torch.Tensor:
    """What ``fusebackend::index_add`` computes, rounded once from a sum in float64 (integers: in int64).

    Args:
        self: any shape; what is added to.
        dim: the indexed dimension of self and source.
        index: (n,) int32 or int64, the row of self that each entry goes to.
        source: as self but for ``dim``, which has n entries, or any number with ``source_index``.
        weight: (n,) factors, in source's dtype.
        source_index: (n,) int32 or int64; entry k is row ``source_index[k]`` of source. Negative: from the end.
        ignore_index: entries with this index add nothing.
        bounds: STRICT, WRAP or DROP.

    Returns:
        A new tensor; in 16-bit floats the kernels may round at each addition, unless asked to be ``precise``.
    """
    wide = torch.float64 if self.is_floating_point() else torch.int64
    index, rows = index.long(), self.shape[dim]
    entries = source.to(wide) if source_index is None else source.to(wide).index_select(dim, source_index.long() % source.shape[dim])
    shape = [-1 if d == dim % self.dim() else 1 for d in range(self.dim())]
    factor = torch.full_like(index, 1, dtype=wide) if weight is None else weight.to(wide)
    entries = entries * (factor * (alpha if wide is torch.float64 else int(alpha))).reshape(shape)
    kept = torch.ones_like(index, dtype=torch.bool) if ignore_index is None else index != ignore_index
    if bounds == WRAP:
        index = torch.where(index < 0, index + rows, index)
    if bounds == DROP:
        kept &= (index >= 0) & (index < rows)
    kept = kept.nonzero()[:, 0]
    return self.to(wide).index_add(dim, index[kept], entries.index_select(dim, kept)).to(self.dtype)


def _fake_in_place(self, *options):
    return None


def _fake(self, *options):
    return self.new_empty_strided(self.shape, self.stride())


def _fake_zeros(rows, dim, index, source, *options):
    shape = list(source.shape)
    shape[dim] = rows
    return source.new_empty(shape)


for _schema, _shape in (
    (f"index_add_(Tensor(a!) self, {_OPTIONS}) -> ()", _fake_in_place),
    (f"index_add(Tensor self, {_OPTIONS}) -> Tensor", _fake),
    (f"index_add_zeros(SymInt rows, {_OPTIONS}) -> Tensor", _fake_zeros),
):
    ops.define(_schema, fake=_shape, layout=torch.Tag.needs_exact_strides)


# ---- what the graph computes ----


@dataclasses.dataclass
class Site:
    """One accumulation, read off the graph and narrowed by what is absorbed."""

    output: fx.Node  # whose value the replacement computes
    self: fx.Node
    dim: int
    index: fx.Node
    values: fx.Node
    alpha: Any = 1
    bounds: int = STRICT
    ignore: int | None = None
    weight: fx.Node | None = None
    source_index: fx.Node | None = None
    rounded_once: bool = False  # a convert to fp32 before and one back after were absorbed
    index_dims: int = 1  # how many dimensions of values stand for the indexed one
    interior: list[fx.Node] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def onto_zeros(self) -> bool:
        return _is_constant(self.self, 0)

    def absorb(self, nodes: list[fx.Node], values: fx.Node, note: str) -> None:
        self.interior += nodes
        self.values = values
        self.notes.append(note)


def _is_constant(node: Any, number: float) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and node.args[1] == number


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _one_index(node: fx.Node, indices: list) -> tuple[int, fx.Node] | Reject:
    """The dimension and the node of the only index in a list of optional ones."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) != 1:
        return Reject(f"{len(given)} index tensors; one is accepted", node)
    dtype = g.value(given[0][1]).dtype
    if dtype not in (torch.int64, torch.int32):
        return Reject(f"the index is {str(dtype).removeprefix('torch.')}; int32 and int64 are accepted", node)
    return given[0]


def _from_index_put(node: fx.Node) -> Site | Reject | None:
    args = g.arguments(node)
    if not args["accumulate"]:
        return None
    found = _one_index(node, args["indices"])
    if isinstance(found, Reject):
        return found
    return Site(node, args["self"], *found, args["values"], bounds=WRAP, index_dims=g.value(found[1]).dim())


def _from_index_add(node: fx.Node) -> Site | Reject | None:
    args = g.arguments(node)
    if not g.value(args["self"]).dim():
        return Reject("a tensor without dimensions", node)
    found = _one_index(node, [args["index"]])
    if isinstance(found, Reject):
        return found
    return Site(node, args["self"], args["dim"] % max(g.value(args["self"]).dim(), 1), args["index"], args["source"], args["alpha"])


def _row_index(index: fx.Node, dim: int, whole: torch.Tensor) -> fx.Node | Reject:
    """The one index a row that ``index`` (of scatter or gather) repeats along whole rows of ``whole``."""
    tensor = g.value(index)
    if tensor.dim() != whole.dim():  # scalars count as vectors of one
        return Reject("the index has another rank than what it indexes", index)
    for d in range(tensor.dim()):
        if d != dim and not g.same_size(tensor.shape[d], whole.shape[d]):
            return Reject("the index does not cover whole rows", index)
    if tensor.dim() == 1:
        return index
    inner = index.args[0] if index.target is aten.expand.default else None
    if inner is not None and g.value(inner).dim() == tensor.dim():
        if all(d == dim or g.same_size(size, 1) for d, size in enumerate(g.value(inner).shape)):
            return inner
    return Reject("the index is not one entry a row, expanded along the row", index)


def _from_scatter_add(node: fx.Node) -> Site | Reject | None:
    args = g.arguments(node)
    if node.target is aten.scatter_reduce.two and (args["reduce"] != "sum" or not args["include_self"]):
        return None
    tensor, source = g.value(args["index"]), g.value(args["src"])
    if not tensor.dim():
        return Reject("a tensor without dimensions", node)
    if not _same_shape(tensor.shape, source.shape):
        return Reject("the index does not cover all of the source", node)
    dim = args["dim"] % tensor.dim()
    index = _row_index(args["index"], dim, g.value(args["self"]))
    return index if isinstance(index, Reject) else Site(node, args["self"], dim, index, args["src"])


def _from_masked(node: fx.Node) -> Site | Reject | None:
    args = g.arguments(node)
    found = _one_index(node, args["indices"])
    if isinstance(found, Reject):
        return found
    site = Site(node, args["self"], *found, args["values"], bounds=DROP, index_dims=g.value(found[1]).dim())
    if site.dim != 0:
        return Reject("a mask with an index that is not on the first dimension", node)
    mask, index, chain = args["mask"], site.index, []
    while mask.target is aten.unsqueeze.default and mask.args[1] % g.value(mask).dim() >= site.index_dims:
        chain.append(mask)
        mask = mask.args[0]
    rows = g.value(site.self).shape[0]
    leaves = [mask]
    while leaves:
        leaf = leaves.pop()
        chain.append(leaf)
        if leaf.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
            leaves += leaf.args[:2]
        elif leaf.target is aten.ne.Scalar and leaf.args[0] is index and site.ignore in (None, leaf.args[1]):
            site.ignore = leaf.args[1]
        elif not (leaf.target is aten.ge.Scalar and leaf.args[0] is index and leaf.args[1] == 0) and not (
            leaf.target is aten.lt.Scalar and leaf.args[0] is index and g.same_size(_size(leaf.args[1]), rows)
        ):
            return Reject("the mask is more than a check of bounds and padding", leaf)
    if len(chain) == len(set(chain)) and all(_inside(chain, n, node) for n in chain):
        site.interior += chain
    return site


def _size(argument: Any) -> Any:
    return g.value(argument) if isinstance(argument, fx.Node) else argument


def _inside(nodes: list[fx.Node], node: fx.Node, end: fx.Node) -> bool:
    return all(u is end or u in nodes for u in node.users)


_READERS = {
    aten.index_put.default: _from_index_put,
    aten._unsafe_index_put.default: _from_index_put,
    aten.index_add.default: _from_index_add,
    aten.scatter_add.default: _from_scatter_add,
    aten.scatter_reduce.two: _from_scatter_add,
    aten._unsafe_masked_index_put_accumulate.default: _from_masked,
}


# ---- what is absorbed around it ----


def _absorb_rounding(site: Site) -> None:
    """convert(g, fp32) -> accumulate onto fp32 zeros -> convert back: a sum that is rounded once."""
    if not (site.onto_zeros and g.value(site.output).dtype is torch.float32 and site.values.target is prims.convert_element_type.default):
        return
    narrow, back = site.values.args[0], _only_user(site.output)
    dtype = g.value(narrow).dtype
    if dtype not in HALVES or back is None or _only_user(site.values) is None:
        return
    if back.target is prims.convert_element_type.default and back.args[1] is dtype:
        site.absorb([site.values, site.output], narrow, "summed in fp32 and rounded once")
        site.output, site.rounded_once = back, True


def _absorb_padding(site: Site) -> None:
    """where(unsqueeze(idx == pad), 0, g) -> accumulate: entries of the padding index add nothing."""
    node = site.values
    if node.target is not aten.where.self or _only_user(node) is None or site.ignore is not None:
        return
    condition, zero, kept = node.args
    chain = []
    while condition.target is aten.unsqueeze.default and condition.args[1] % g.value(condition).dim() >= site.index_dims + site.dim:
        chain.append(condition)
        condition = condition.args[0]
    whole_rows = site.dim == 0 and g.value(condition).dim() == site.index_dims and len(chain) == g.value(node).dim() - site.index_dims
    if condition.target is aten.eq.Scalar and condition.args[0] is site.index and whole_rows and _is_constant(zero, 0):
        if g.value(kept).shape == g.value(node).shape:
            chain = [n for n in [*chain, condition] if _inside([*chain, condition], n, node)]
            site.ignore = condition.args[1]
            site.absorb([node, *chain], kept, f"index {site.ignore} left out")


def _absorb_scale(site: Site) -> bool:
    """mul by a number becomes alpha; mul by one factor a row becomes the weight."""
    node = site.values
    tensor = g.value(node)
    if node.target is not aten.mul.Tensor or _only_user(node) is None or not tensor.is_floating_point():
        return False
    for x, factor in (node.args, node.args[::-1]):
        if not g.is_tensor(x) or g.value(x).dtype != tensor.dtype or not _same_shape(g.value(x).shape, tensor.shape):
            continue
        if isinstance(factor, (int, float)) and math.isfinite(factor):
            site.alpha *= factor
            site.absorb([node], x, "a scale")
            return True
        if g.is_tensor(factor) and site.weight is None and site.index_dims == 1 and _is_row_weight(g.value(factor), tensor, site.dim):
            site.weight = factor
            site.absorb([node], x, "a weight a row")
            return True
    return False


def _same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(g.same_size, a, b))


def _is_row_weight(factor: torch.Tensor, source: torch.Tensor, dim: int) -> bool:
    shape = [1] * (source.dim() - factor.dim()) + list(factor.shape)
    return factor.dtype == source.dtype and all(g.same_size(s, source.shape[dim] if d == dim else 1) for d, s in enumerate(shape))


def _absorb_gather(site: Site) -> None:
    """index(x, [src]), or gather(x, dim, expand(src)), along the same dimension: rows are read where they lie."""
    node = site.values
    if _only_user(node) is None or site.index_dims != 1:
        return
    if node.target is aten.index.Tensor:
        found = _one_index(node, node.args[1])
        if isinstance(found, Reject) or g.value(found[1]).dim() != 1:
            return
        dim, index = found
    elif node.target is aten.gather.default:
        dim = node.args[1] % g.value(node).dim()
        index = _row_index(node.args[2], dim, g.value(node.args[0]))
    else:
        return
    if dim == site.dim and not isinstance(index, Reject):
        site.source_index = index
        site.absorb([node], node.args[0], "the gather of the source")


# ---- is it right, and does it pay? ----

# So many entries a row on average that atomic additions queue up, and the kernels sum in shared memory first.
CROWDED = 32

# Beyond these sizes the fp32 copy of a 16-bit output, and the passes over it, are what takes the time.
LARGE_ROWS, LARGE_ENTRIES = 4096, 65536

# PyTorch's index_put sums 16-bit slices up to this size in fp32.
NARROW = 32


def _refusal(site: Site) -> Reject | None:
    """Why the kernels can't do this."""
    target, source, result = g.value(site.self), g.value(site.values), g.value(site.output)
    reason = native.load().why_not(target.device)
    if reason:
        return Reject(reason)
    if result.dtype not in DTYPES:
        return Reject(f"dtype {str(result.dtype).removeprefix('torch.')} is not supported")
    if source.dtype != result.dtype:
        return Reject("self and source differ in dtype", site.values)
    if not isinstance(site.alpha, (int, float)) or not math.isfinite(site.alpha) or abs(site.alpha) > 2**53:
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


def _slow_route(site: Site) -> Reject | None:
    """16-bit sums that the kernels round once, through an fp32 copy of an output too large for shared memory: three
    times the time of additions in 16 bits, which is what Inductor does. GraphSAGE in bf16, 16 edges a node, ran at 0.45x."""
    result = g.value(site.output)
    if result.device.type != "cuda" or result.dtype not in (torch.float16, torch.bfloat16):
        return None
    entries, rows = g.hint(g.value(site.index).numel()), g.hint(g.value(site.self).shape[site.dim])
    if entries is None or rows is None or rows <= LARGE_ROWS or entries <= LARGE_ENTRIES:
        return None
    if entries >= 16 * rows or _is_narrow(site):
        return Reject(f"{entries} 16-bit entries onto {rows} rows, each sum rounded once: Inductor rounds at each addition and is faster")
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    sizes, strides = g.hints(tensor.shape), g.hints(tensor.stride())
    return sizes is not None and strides is not None and 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) == math.prod(sizes)


def _is_narrow(site: Site) -> bool:
    shape = [g.hint(s) for s in g.value(site.self).shape[site.dim + 1 :]]
    return None not in shape and math.prod(shape) <= NARROW


class IndexAdd(Pattern):
    """See the module's docstring."""

    name = "index_add"
    anchors = tuple(_READERS)

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = _READERS[node.target](node)
        if not isinstance(site, Site):
            return site
        target, index, values = g.value(site.self), g.value(site.index), g.value(site.values)
        if not target.dim():
            return Reject("a tensor without dimensions", node)
        scatter = node.target in (aten.scatter_add.default, aten.scatter_reduce.two)
        entries = values.shape[site.dim : site.dim + 1] if scatter else index.shape
        whole = (*target.shape[: site.dim], *entries, *target.shape[site.dim + 1 :])
        if not _same_shape(values.shape, whole):
            return Reject(f"the values, {g.spec(values)}, are broadcast", site.values)
        if site.index_dims != 1 and not all(isinstance(s, int) for d, s in enumerate(target.shape) if d != site.dim):
            return Reject("an index of several dimensions beside sizes that are not known", site.index)
        _absorb_padding(site)
        _absorb_rounding(site)
        while _absorb_scale(site):
            pass
        _absorb_gather(site)
        refusal = _refusal(site) or _slow_route(site) or _fused_away(site, node)
        if refusal:
            return refusal
        if not site.onto_zeros and _old_value_is_needed(site) and not _is_dense(target):
            return Reject("a copy of self is needed, and self has gaps in memory", site.self)
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic:
            site.notes.append("deterministic")
        if site.onto_zeros:
            site.notes.append("zeros")
            if _only_user(site.self) is node:
                site.interior.append(site.self)
        interior = tuple(n for n in dict.fromkeys(site.interior) if n is not site.output)
        return Match(
            outputs=(site.output,),
            emit=lambda e: _emit(e, site, deterministic),
            interior=interior,
            note=", ".join(site.notes),
        )


# ---- the replacement ----


def _emit(e: Emitter, site: Site, deterministic: bool) -> fx.Node:
    index, values, weight = site.index, site.values, site.weight
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
        "bounds": site.bounds,
        "precise": site.rounded_once or (g.value(values).dtype in HALVES and site.bounds == WRAP and _is_narrow(site)),
        "deterministic": deterministic,
    }
    kernels = torch.ops.fusebackend
    if site.onto_zeros:
        return e.call(kernels.index_add_zeros.default, site.self.args[0][site.dim], *options.values())
    if _old_value_is_needed(site):
        return e.call(kernels.index_add.default, site.self, *options.values())
    # Mutable, but functionalised: Inductor's reinplacing pass settles whether self may be overwritten, else it copies.
    updated = e.call(
        torch.ops.higher_order.auto_functionalized_v2,
        kernels.index_add_.default,
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


register(IndexAdd())
