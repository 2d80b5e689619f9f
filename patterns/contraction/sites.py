"""Sums of products of broadcast tensors, read from the graph: which dims are batch, free and summed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.factors import SCALINGS, Factor, Folded, Split, is_scaling, number_of, read_factor, same_as_one
from fusebackend.rewriting.emitted_sizes import number_of_chunks
from fusebackend.rewriting.pattern import Reject
from fusebackend.rewriting.view_dims import FOLLOWED

aten, prims = torch.ops.aten, torch.ops.prims

DEVICES = ("cpu", "cuda")
SUMS = (aten.sum.dim_IntList, aten.mean.dim)
_MOST_FACTORS = 4
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Site:
    """``sum(x * y)`` or its mean. Dims are those of the product; dims of size 1 are in no list.

    Attributes:
        node: the sum.
        product: the multiplication.
        between: the nodes from the product to the sum's input: views, casts and scalings.
        scalings: those that scale by a number.
        parts: further multiplications, of more than two factors.
        x, y: the factors; the free dims of ``x`` stand before those of ``y`` in the result's memory.
        batch: dims of both factors that are kept.
        free_x, free_y: dims of one factor.
        summed: dims of both factors that are summed.
        repeated: dims of neither factor, along which the result repeats itself.
        result_dims: for each dim of the sum's result the dims of the product that it runs along, outermost first.
        dtype: in which the matrix product is computed.
        other_users: what else uses the product.
        chunked: dims that are summed after the matrix product, for which they are batch dims.
        split: the dim of which a part is among them, and the rest is summed by the product.
        undivided: the site without these; None if there are none.
    """

    node: fx.Node
    product: fx.Node
    between: tuple[fx.Node, ...]
    scalings: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    x: Factor | Folded
    y: Factor | Folded
    batch: tuple[int, ...]
    free_x: tuple[int, ...]
    free_y: tuple[int, ...]
    summed: tuple[int, ...]
    repeated: tuple[int, ...]
    result_dims: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    other_users: tuple[fx.Node, ...]
    chunked: tuple[int, ...] = ()
    split: Split | None = None
    undivided: Site | None = None

    @property
    def shape(self) -> Sequence[int | torch.SymInt]:
        """Of the product."""
        return g.value(self.product).shape

    @property
    def device(self) -> torch.device:
        return g.value(self.node).device

    @property
    def is_mean(self) -> bool:
        return self.node.target is aten.mean.dim

    @property
    def scales_result(self) -> bool:
        """Whether the numbers scale the result rather than a factor."""
        return all(abs(number_of(s)) >= 1 for s in self.scalings)

    @functools.cached_property
    def sizes(self) -> list[int] | None:
        """Of the product's dims, as they were when the graph was traced, and of the inner part of one that is split, which is
        padded to whole chunks; None if one depends on data."""
        sizes = g.hints(self.shape)
        if sizes is not None and self.split is not None:
            sizes = [*sizes, self.split.length]
            divided, is_symbolic = self.split.dim, not isinstance(self.shape[self.split.dim], int)
            sizes[divided] = number_of_chunks(sizes[divided], self.split.length, is_symbolic)
        return sizes

    def count(self, dims: Iterable[int]) -> int:
        """The number of elements along ``dims``, by the hints."""
        assert self.sizes is not None
        return math.prod(self.sizes[d] for d in dims)


def read(node: fx.Node) -> Site | Reject | None:
    """The contraction at ``node``, one of ``SUMS``; why it is not replaced; or None if it is no sum of products of matrices."""
    found = _find_product(node)
    if found is None or not found[2]:  # a scalar may be "summed along dim 0"
        return None
    product, between, dims = found
    kept, summed, result_dims = _reduced(node, dims)
    shape = g.value(product).shape
    if any(g.same_size(n, 0) for n in shape):
        return Reject("a product without elements", node)
    factors, parts = _factors(product)
    read_ones = [read_factor(f, shape) for f in factors]
    known = [f for f in read_ones if f is not None]
    if len(known) < len(read_ones):
        return Reject("whether a dim is broadcast is not known before run time (sizes are symbolic)", node)
    multiplied = functools.reduce(torch.promote_types, [g.value(n).dtype for n in (*parts, product)])
    grouped = _grouped(known, kept, summed, shape, multiplied)
    if grouped is None:
        return None
    x, y = grouped
    both, alone_x, alone_y = (x.dims & y.dims, x.dims - y.dims, y.dims - x.dims)
    real = {d for d, size in enumerate(shape) if not same_as_one(size)}
    if not summed & real <= both:
        return Reject("a summed dim belongs to one factor alone, or to none: it is no dim of a matrix product", node)
    value = g.value(node)
    dtypes = [g.value(n).dtype for n in (*parts, product, *between, node)]
    if any(t not in _FLOATS for t in dtypes):
        return Reject(f"dtypes {sorted(set(map(str, dtypes)))}; bf16, fp16, fp32 and fp64 are accepted", node)
    if value.device.type not in DEVICES:
        return Reject(f"device {value.device.type!r}; {' and '.join(DEVICES)} are accepted", node)
    order = [d for dims in result_dims for d in dims]  # as the result's dims run
    free_x, free_y, batch = ([d for d in order if d in dims] for dims in (alone_x, alone_y, both))
    if order.index(free_y[0]) < order.index(free_x[0]):
        x, y, free_x, free_y = y, x, free_y, free_x
    larger = max(x, y, key=lambda f: _elements(f, shape))
    inner = sorted(both & summed, key=larger.axis_order)
    used = (*parts, product, *between, node)
    return Site(
        node, product, between, tuple(n for n in between if n.target in SCALINGS), parts, x, y,
        tuple(batch), tuple(free_x), tuple(free_y), tuple(inner),
        tuple(d for d in order if d in real and d not in x.dims | y.dims),
        result_dims,
        functools.reduce(torch.promote_types, dtypes),
        tuple(u for n in used[:-1] for u in n.users if u not in used),
    )  # fmt: skip


def _factors(product: fx.Node) -> tuple[list[fx.Node], tuple[fx.Node, ...]]:
    """The factors of ``product``, at most ``_MOST_FACTORS``, and the multiplications before it that they are factors of.

    A multiplication of which a factor is broadcast is taken apart, where it has all dims of ``product``.
    """
    factors, parts = list(product.args), []
    while len(factors) < _MOST_FACTORS:
        part = next((f for f in factors if _is_broadcast_product(f, g.value(product).shape)), None)
        if part is None:
            break
        i = factors.index(part)
        factors[i : i + 1] = part.args
        parts.append(part)
    return factors, tuple(dict.fromkeys(parts))


def _is_broadcast_product(node: fx.Node, shape: Sequence) -> bool:
    """Whether ``node`` multiplies two tensors to one of this shape and one of them is smaller."""
    if node.target is not aten.mul.Tensor or not all(g.is_tensor(f) for f in node.args):
        return False
    if not g.same_sizes(g.value(node).shape, shape):
        return False
    read_ones = [read_factor(f, shape) for f in node.args]
    factors = [f for f in read_ones if f is not None]
    return len(factors) == 2 and factors[0].dims != factors[1].dims


def _grouped(
    factors: list[Factor], kept: set[int], summed: set[int], shape: Sequence, dtype: torch.dtype
) -> tuple[Factor | Folded, Factor | Folded] | None:
    """Two factors of a matrix product, each of which may be several that are multiplied first, in ``dtype``: exactly if that can be, of the
    fewest elements."""
    best, least = None, (True, math.inf)
    first, rest = factors[0], factors[1:]
    for count in range(len(rest)):
        for others in itertools.combinations(rest, count):
            x = Folded((first, *others), dtype) if others else first
            right = [f for f in rest if not any(f is other for other in others)]
            y = Folded(tuple(right), dtype) if len(right) > 1 else right[0]
            both, alone_x, alone_y = x.dims & y.dims, x.dims - y.dims, y.dims - x.dims
            reorders = not all(f.is_exact for f in (x, y) if isinstance(f, Folded))
            cost = reorders, _elements(x, shape) + _elements(y, shape)
            if both & summed and alone_x & kept and alone_y & kept and cost < least:
                best, least = (x, y), cost
    return best


def _elements(factor: Factor | Folded, shape: Sequence) -> int:
    return math.prod(g.hint(shape[d]) or 1 for d in factor.dims)


def _find_product(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...], list[list[int]]] | None:
    """The multiplication of tensors behind ``node``'s input, the nodes between, and the product's dims along each dim of that input."""
    path: list[fx.Node] = []
    source = node.args[0]
    while isinstance(source, fx.Node) and (source.target in FOLLOWED or is_scaling(source)):
        path.append(source)
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.mul.Tensor or not g.is_tensor(source):
        return None
    if not all(g.is_tensor(f) for f in source.args):
        return None
    dims = [[d] if not same_as_one(size) else [] for d, size in enumerate(g.value(source).shape)]
    for view in reversed(path):
        moved = dims if is_scaling(view) else FOLLOWED[view.target](view, dims)
        if moved is None:
            return None
        dims = moved
    return source, tuple(reversed(path)), dims


def _reduced(node: fx.Node, dims: list[list[int]]) -> tuple[set[int], set[int], tuple[tuple[int, ...], ...]]:
    """The dims of the product that ``node`` keeps, those that it sums, and those along each dim of its result."""
    call = g.arguments(node)
    given = call["dim"]
    axes = set(range(len(dims))) if not given else {d % len(dims) for d in given}
    summed = {d for axis in axes for d in dims[axis]}
    kept = {d for axis, ds in enumerate(dims) if axis not in axes for d in ds}
    if call["keepdim"]:
        return kept, summed, tuple(() if axis in axes else tuple(ds) for axis, ds in enumerate(dims))
    return kept, summed, tuple(tuple(ds) for axis, ds in enumerate(dims) if axis not in axes)
