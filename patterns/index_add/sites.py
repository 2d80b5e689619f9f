"""Reads sums by index off a graph: every spelling of ``index_add``, and the nodes around one that the kernels absorb."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add.ops import DROP, HALVES, SOURCE_STRICT, STRICT, WRAP
from fusebackend.rewriting.in_place import may_be_in_memory_of
from fusebackend.rewriting.pattern import Reject

aten = torch.ops.aten
prims = torch.ops.prims

#: What a sum starts from: zeros, self, whose old value nobody needs, or a copy of it.
ZEROS, IN_PLACE, COPY = range(3)

# PyTorch's index_put sums 16-bit slices of up to so many elements in fp32, and so do we.
MAX_EAGER_FP32_SLICE = 32


@dataclasses.dataclass
class Site:
    """One sum by index: ``output = self; output[index[k]] += alpha * weight[k] * values[source_index[k] or k]`` along ``dim``.

    Attributes:
        output: the node whose value the replacement computes.
        values: what is added, after all that is absorbed.
        bounds, ignore: what an index outside of self means, and the index whose entries add nothing; see ops.py.
        source_strict: whether a negative source index is an error.
        rounded_once: whether a conversion of the values to fp32, and one of the result back, were absorbed.
        index_dims: how many dimensions of ``values`` stand for the indexed one.
        interior: the nodes that are absorbed.
        notes: what is absorbed, for the report.
        sharing: the sums that may share a sorted index, this one and others; empty if this one goes by none.
        anchor: the sum itself.
    """

    output: fx.Node
    self: fx.Node
    dim: int
    index: fx.Node
    values: fx.Node
    alpha: Any = 1
    bounds: int = STRICT
    ignore: int | None = None
    weight: fx.Node | None = None
    source_index: fx.Node | None = None
    source_strict: bool = False
    rounded_once: bool = False
    index_dims: int = 1
    interior: list[fx.Node] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    sharing: list[Site] = dataclasses.field(default_factory=list)
    anchor: fx.Node = dataclasses.field(init=False)

    def __post_init__(self):
        self.anchor = self.output

    @property
    def all_bounds(self) -> int:
        return self.bounds + SOURCE_STRICT * self.source_strict

    @property
    def onto_zeros(self) -> bool:
        return is_constant(self.self, 0)

    @property
    def rows(self) -> Any:
        """How many rows the indices name: an int or a SymInt."""
        return g.value(self.self).shape[self.dim]

    @property
    def entries(self) -> Any:
        """How many rows are added: an int or a SymInt."""
        return g.value(self.index).numel()

    @functools.cached_property
    def start(self) -> int:
        """What the kernels start from."""
        if self.onto_zeros:
            return ZEROS
        return COPY if _old_value_is_needed(self) else IN_PLACE

    @property
    def precise(self) -> bool:
        """Whether a sum of 16 bits is rounded once, whatever that costs: as PyTorch's is."""
        return self.rounded_once or (g.value(self.values).dtype in HALVES and _is_summed_in_fp32_eagerly(self))

    def alone(self) -> Site:
        """The same without a sorted index."""
        site = copy.copy(self)
        site.sharing = []
        return site

    def absorb(self, nodes: list[fx.Node], values: fx.Node, note: str) -> None:
        self.interior += nodes
        self.values = values
        self.notes.append(note)


def is_exact(factor: Any) -> bool:
    """Whether multiplying by a factor changes the sign at most."""
    return isinstance(factor, (int, float)) and abs(factor) == 1


def may_multiply(a: float, b: float) -> bool:
    """Whether ``x * (a * b)`` overflows and underflows where ``x * b * a`` does, for any x, and a kernel takes ``a * b``.

    If both factors are at least 1, or at most 1, the value in between is out of range only if the product is."""
    same_side = abs(a) == 1 or abs(b) == 1 or (abs(a) < 1) == (abs(b) < 1)
    return same_side and is_accepted_alpha(a * b)


def is_accepted_alpha(alpha: float) -> bool:
    """Whether a number is exact in every kernel's type if it is an integer, and neither overflows nor vanishes if it is not."""
    return alpha == 0 or 2.0**-100 <= abs(alpha) <= 2**53


def is_constant(node: Any, number: float) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and node.args[1] == number


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
    return Site(node, args["self"], args["dim"] % g.value(args["self"]).dim(), args["index"], args["source"], args["alpha"])


def _row_index(index: fx.Node, dim: int, whole: torch.Tensor) -> fx.Node | Reject:
    """The index that ``index``, of a scatter or gather, repeats along whole rows of ``whole``: one number for each entry."""
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
        if all(g.same_size(size, tensor.shape[d] if d == dim else 1) for d, size in enumerate(g.value(inner).shape)):
            return inner
    return Reject("the index is not one number a row, expanded along the row", index)


def _from_scatter_add(node: fx.Node) -> Site | Reject | None:
    args = g.arguments(node)
    if node.target is aten.scatter_reduce.two and (args["reduce"] != "sum" or not args["include_self"]):
        return None
    tensor, source = g.value(args["index"]), g.value(args["src"])
    if not tensor.dim():
        return Reject("a tensor without dimensions", node)
    if not g.same_sizes(tensor.shape, source.shape):
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
    leaves, bounds = [mask], set()
    while leaves:
        leaf = leaves.pop()
        chain.append(leaf)
        if leaf.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
            leaves += leaf.args[:2]
        elif (
            leaf.target is aten.ne.Scalar
            and leaf.args[0] is index
            and isinstance(leaf.args[1], int)
            and site.ignore in (None, leaf.args[1])
        ):
            site.ignore = leaf.args[1]
        elif leaf.args[:1] == (index,) and (
            (leaf.target is aten.ge.Scalar and leaf.args[1] == 0)
            or (leaf.target is aten.lt.Scalar and g.same_size(_size(leaf.args[1]), rows))
        ):
            bounds.add(leaf.target)
        else:
            return Reject("the mask is more than a check of bounds and padding", leaf)
    if len(bounds) < 2:
        return Reject("the mask does not leave out every index that is out of range", mask)
    if len(chain) == len(set(chain)) and all(_inside(chain, n, node) for n in chain):
        site.interior += chain
    return site


def _size(argument: Any) -> Any:
    return g.value(argument) if isinstance(argument, fx.Node) else argument


def _inside(nodes: list[fx.Node], node: fx.Node, end: fx.Node) -> bool:
    return all(u is end or u in nodes for u in node.users)


READERS = {
    aten.index_put.default: _from_index_put,
    aten._unsafe_index_put.default: _from_index_put,
    aten.index_add.default: _from_index_add,
    aten.scatter_add.default: _from_scatter_add,
    aten.scatter_reduce.two: _from_scatter_add,
    aten._unsafe_masked_index_put_accumulate.default: _from_masked,
}


def read(node: fx.Node) -> Site | Reject | None:
    """The sum that ``node`` is, with all that can be absorbed into it; a Reject if no kernel takes its form; None if it is none."""
    site = READERS[node.target](node)
    if not isinstance(site, Site):
        return site
    target, index, values = g.value(site.self), g.value(site.index), g.value(site.values)
    if not target.dim():
        return Reject("a tensor without dimensions", node)
    scatter = node.target in (aten.scatter_add.default, aten.scatter_reduce.two)
    entries = values.shape[site.dim : site.dim + 1] if scatter else index.shape
    whole = (*target.shape[: site.dim], *entries, *target.shape[site.dim + 1 :])
    if not all(map(_must_be_same, values.shape, whole)) or len(values.shape) != len(whole):
        return Reject(f"the values, {g.spec(values)}, are broadcast", site.values)
    _absorb_padding(site)
    _absorb_rounding(site)
    while _absorb_scale(site):
        pass
    _absorb_gather(site)
    return site


# ---- what the operator must do besides ----


def _old_value_is_needed(site: Site) -> bool:
    """Whether self must be copied anyway; the operator then does that itself, and faster."""
    memory = g.through_views(site.self)
    inputs = [n for n in may_be_in_memory_of(site.self) if n.op == "placeholder"]
    if any(n is memory or _is_written(n) for n in inputs) and any(c.op == "output" for c in g.consumers(site.output)):
        return True  # otherwise the input itself would be returned, where the user gets a copy
    if any(n is not None and g.through_views(n) is memory for n in (site.values, site.weight, site.index, site.source_index)):
        return True
    later = [u for u in site.self.users if site.output < u]
    written_back = any(u.target is aten.copy_.default and u.args[0] is site.self for u in later)
    return not written_back and (bool(later) or site.self.op == "placeholder")


def _is_written(node: fx.Node) -> bool:
    return any(u.target is aten.copy_.default and u.args[0] is node for u in node.users)


def _is_summed_in_fp32_eagerly(site: Site) -> bool:
    sizes = g.hints(g.value(site.self).shape[site.dim + 1 :])
    return site.bounds == WRAP and sizes is not None and math.prod(sizes) <= MAX_EAGER_FP32_SLICE


# ---- the nodes around it ----


def _absorb_rounding(site: Site) -> None:
    """convert(g, fp32) -> sum onto fp32 zeros -> convert back: a sum that is rounded once."""
    if not (site.onto_zeros and g.value(site.output).dtype is torch.float32 and site.values.target is prims.convert_element_type.default):
        return
    narrow, back = site.values.args[0], g.only_user(site.output)
    dtype = g.value(narrow).dtype
    if dtype not in HALVES or back is None or g.only_user(site.values) is None:
        return
    if back.target is prims.convert_element_type.default and back.args[1] is dtype:
        site.absorb([site.values, site.output], narrow, "summed in fp32 and rounded once")
        site.output, site.rounded_once = back, True


def _absorb_padding(site: Site) -> None:
    """where(unsqueeze(idx == pad), 0, g) -> sum: entries of the padding index add nothing."""
    node = site.values
    if node.target is not aten.where.self or g.only_user(node) is None or site.ignore is not None:
        return
    condition, zero, kept = node.args
    chain = []
    while condition.target is aten.unsqueeze.default and condition.args[1] % g.value(condition).dim() >= site.index_dims + site.dim:
        chain.append(condition)
        condition = condition.args[0]
    if condition.target is aten.eq.Scalar and not _is_in_range(site, condition.args[1]):
        return  # not known, or eager refuses that index, though zeros are what would be added there
    whole_rows = site.dim == 0 and g.value(condition).dim() == site.index_dims and len(chain) == g.value(node).dim() - site.index_dims
    if condition.target is aten.eq.Scalar and condition.args[0] is site.index and whole_rows and is_constant(zero, 0):
        if g.value(kept).shape == g.value(node).shape:
            chain = [n for n in [*chain, condition] if _inside([*chain, condition], n, node)]
            site.ignore = condition.args[1]
            site.absorb([node, *chain], kept, f"index {site.ignore} ignored")


def _is_in_range(site: Site, index: object) -> bool:
    """Whether an index is a number that is one of a row of self, or adds nothing anyway. It may be computed from symbolic sizes."""
    if not isinstance(index, int):
        return False
    if site.bounds == DROP:
        return True
    first = -site.rows if site.bounds == WRAP else 0
    return statically_known_true(first <= index) and statically_known_true(index < site.rows)


def _absorb_scale(site: Site) -> bool:
    """mul by a number becomes alpha; mul by one factor a row becomes the weight.

    The kernels multiply by ``alpha * weight``. Where both scale, or two numbers do, that may overflow or underflow where the factors one
    after the other do not, or the other way round. So it is one of them, unless all numbers are on the same side of 1.
    """
    node = site.values
    tensor = g.value(node)
    if node.target is not aten.mul.Tensor or g.only_user(node) is None or not tensor.is_floating_point():
        return False
    for x, factor in (node.args, node.args[::-1]):
        if not g.is_tensor(x) or g.value(x).dtype != tensor.dtype or not g.same_sizes(g.value(x).shape, tensor.shape):
            continue
        if isinstance(factor, (int, float)) and isinstance(site.alpha, (int, float)):
            if not (is_exact(factor) or site.weight is None) or not may_multiply(site.alpha, factor):
                return False
            site.alpha *= factor
            site.absorb([node], x, "a scale")
            return True
        is_weight = g.is_tensor(factor) and site.weight is None and site.index_dims == 1
        if is_weight and is_exact(site.alpha) and _is_row_weight(g.value(factor), tensor, site.dim):
            site.weight = factor
            site.absorb([node], x, "a weight a row")
            return True
    return False


def _must_be_same(size: Any, other: Any) -> bool:
    """Whether a size that differed from ``other`` would be an error: it would not be broadcast, since it is known not to be one."""
    return g.same_size(size, other) or (g.hint(size) == g.hint(other) is not None and statically_known_true(size > 1))


def _is_row_weight(factor: torch.Tensor, source: torch.Tensor, dim: int) -> bool:
    shape = [1] * (source.dim() - factor.dim()) + list(factor.shape)
    return factor.dtype == source.dtype and all(g.same_size(s, source.shape[dim] if d == dim else 1) for d, s in enumerate(shape))


def _absorb_gather(site: Site) -> None:
    """index(x, [src]), or gather(x, src expanded along the rows), along the same dimension: the kernel gathers as it reads."""
    node = site.values
    if g.only_user(node) is None or site.index_dims != 1:
        return
    if node.target is aten.gather.default:
        args = g.arguments(node)
        whole = g.value(args["self"])
        if whole.dim() and args["dim"] % whole.dim() == site.dim:
            index = _row_index(args["index"], site.dim, whole)
            if not isinstance(index, Reject):
                site.source_index, site.source_strict = index, True
                site.absorb([node], args["self"], "the gather of the source")
    elif node.target is aten.index.Tensor:
        found = _one_index(node, node.args[1])
        if not isinstance(found, Reject) and found[0] == site.dim and g.value(found[1]).dim() == 1:
            site.source_index = found[1]
            site.absorb([node], node.args[0], "the gather of the source")
