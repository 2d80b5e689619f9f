"""Sums of products that are written by broadcasting become matrix products.

Whatever wrote them: ``(x[:, :, None] * y[:, None]).sum(-1)``, the gradients of that, a mean of such a product:

    unsqueeze:   f32[8, 64, 1, 128]  = aten.unsqueeze(x, 2)
    unsqueeze_1: f32[8, 1, 64, 128]  = aten.unsqueeze(y, 1)           permute: f32[8, 128, 64] = aten.permute(y, [0, 2, 1])
    mul:         f32[8, 64, 64, 128] = aten.mul(...)              ->  bmm:     f32[8, 64, 64]  = aten.bmm(x, permute)
    sum_1:       f32[8, 64, 64]      = aten.sum(mul, [-1])

Dims of both factors are batch dims where they are kept, and are contracted where they are summed; dims of one factor are rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.contraction.chunks import groups_of_chunks
from fusebackend.patterns.contraction.estimate import estimate
from fusebackend.patterns.contraction.factors import Folded
from fusebackend.patterns.contraction.in_place import InPlace, in_place
from fusebackend.patterns.contraction.legality import accept
from fusebackend.patterns.contraction.operands import operands, permuted, prims
from fusebackend.patterns.contraction.sites import SUMS, Site
from fusebackend.rewriting.emitted_sizes import in_chunks_of, number_of_chunks, product_of, size_of
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class Contraction(Pattern):
    """``sum(mul(x, y), dims)`` of broadcast factors -> ``bmm``."""

    name = "contraction"
    anchors = SUMS

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = accept(node)
        if not isinstance(site, Site):
            return site
        return _match(site, in_place(site))

    def estimate(self, match: Match) -> Estimate | Workload | Sequence[Workload]:
        site, found = match.site
        return estimate(site, found, _match(site, None))

    def examples(self) -> list[tuple[Callable, tuple]]:
        def rows(x, y):
            return (x[:, :, None] * y[:, None]).sum(-1)

        def kept(x, y):
            return (x[:, :, None] * y[:, None]).sum(dim=(0, 3), keepdim=True)

        def mean(x, y):
            return (x[:, :, None] * y[:, None]).mean(-1)

        # In 16 bits eager mode rounds each product, so the results are not to be compared with its own.
        pairs = [(torch.randn(3, 17, 33).to(dtype), torch.randn(3, 20, 33).to(dtype)) for dtype in (torch.float32, torch.float64)]
        return [(fn, pair) for fn in (rows, kept, mean) for pair in pairs]


def _match(site: Site, found: InPlace | None) -> Match:
    """The site as a product in place, or by a library."""
    interior = () if site.other_users else (*site.parts, site.product, *site.between)
    whole = site if found is None else site.undivided or site  # products in place have no chunks
    return Match((site.node,), lambda emitter: _emit(emitter, whole, found), interior, note=_note(whole, found), site=(site, found))


def _emit(emitter: Emitter, site: Site, found: InPlace | None) -> fx.Node:
    if found is not None:
        node, dims = found.emit(emitter, site.node), list(found.layout.result_dims)
    else:
        left, right = (operand.emit(emitter, site.node) for operand in operands(site))
        batch = (*site.batch, *site.chunked)
        node = emitter.call(aten.bmm.default if batch else aten.mm.default, left, right)
        dims = [*batch, *site.free_x, *site.free_y]
    if site.chunked:
        node = _sum_of_chunks(emitter, site, node)
        dims = [d for d in dims if d not in site.chunked]
    elif len(dims) != g.value(node).dim():
        node = emitter.call(aten.reshape.default, node, [_size(emitter, site, d) for d in dims])
    if site.is_mean:
        node = emitter.call(aten.div.Tensor, node, _summed_elements(site))
    for scaling in site.scalings if site.scales_result else ():
        node = emitter.call(scaling.target, node, *scaling.args[1:], **scaling.kwargs)
    if g.value(node).dtype != g.value(site.node).dtype:
        node = emitter.call(prims.convert_element_type.default, node, g.value(site.node).dtype)
    return _in_place_of(emitter, site, node, dims)


def _sum_of_chunks(emitter: Emitter, site: Site, node: fx.Node) -> fx.Node:
    """The sum of the chunks' results, which are a part of the batch of ``node``."""
    before, chunks, behind = ([_size(emitter, site, d) for d in dims] for dims in (site.batch, site.chunked, (*site.free_x, *site.free_y)))
    axis, steps = len(before), groups_of_chunks(site)
    if not steps:
        node = emitter.call(aten.reshape.default, node, [*before, *chunks, *behind])
        return emitter.call(aten.sum.dim_IntList, node, [axis + i for i in range(len(chunks))])
    count = product_of(emitter, chunks)
    node = emitter.call(aten.reshape.default, node, [*before, count, *behind])
    if not isinstance(count, int):
        for _, length in steps[:-1]:
            node = emitter.call(aten.sum.dim_IntList, in_chunks_of(emitter, node, axis, length), [axis + 1])
        return emitter.call(aten.sum.dim_IntList, node, [axis])
    for groups, length in steps:
        whole = count // length
        parts = [node]
        if count % length:
            parts = [emitter.call(aten.slice.Tensor, node, axis, *ends) for ends in ((0, whole * length), (whole * length, count))]
        grouped = emitter.call(aten.reshape.default, parts[0], [*before, whole, length, *behind])
        sums = [emitter.call(aten.sum.dim_IntList, grouped, [axis + 1])]
        sums += [emitter.call(aten.sum.dim_IntList, part, [axis], True) for part in parts[1:]]
        node = sums[0] if len(sums) == 1 else emitter.call(aten.cat.default, sums, axis)
        count = groups
    return emitter.call(aten.squeeze.dim, node, axis)


def _summed_elements(site: Site) -> int:
    return math.prod(site.shape[d] for d in (site.undivided or site).summed)


def _size(emitter: Emitter, site: Site, dim: int) -> int | fx.Node:
    """The size of a dim of the product, read from a factor: the product is gone."""
    size = site.shape[dim]
    if isinstance(size, int):
        return size if site.split is None or dim != site.split.dim else number_of_chunks(size, site.split.length)
    return (site.x if dim in site.x.dims else site.y).size(emitter, dim)


def _in_place_of(emitter: Emitter, site: Site, node: fx.Node, dims: list[int]) -> fx.Node:
    """``node``, which has these dims of the product, in the shape and the memory order of the sum's result."""
    wanted = g.value(site.node)
    order = [d for result in site.result_dims for d in result]
    repeated = [d for d in order if d in site.repeated]
    node = permuted(emitter, node, [dims.index(d) for d in order if d not in site.repeated])
    for d in repeated:
        node = emitter.call(aten.unsqueeze.default, node, order.index(d))
    if repeated:
        sizes = [g.value(site.product).shape[d] if d in repeated else -1 for d in order]
        node = emitter.call(aten.expand.default, node, sizes)
    memory = g.memory_order(wanted)
    in_order = memory is None or memory == list(range(wanted.dim()))
    if [len(r) for r in site.result_dims] != [1] * wanted.dim():
        if repeated or not _is_contiguous(g.value(node)):
            node = emitter.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        sizes_of = [size_of(emitter, node, axis) for axis in range(len(order))]
        shape = [product_of(emitter, [sizes_of[order.index(d)] for d in result]) for result in site.result_dims]
        node = emitter.call(aten.reshape.default, node, shape)
    if g.difference(wanted, g.value(node)) is None:
        return node
    if in_order:
        return emitter.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    assert memory is not None
    node = emitter.call(aten.clone.default, permuted(emitter, node, memory), memory_format=torch.contiguous_format)
    return permuted(emitter, node, [memory.index(d) for d in range(wanted.dim())])


def _is_contiguous(value: torch.Tensor) -> bool:
    """Whether that is known, without a guard."""
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not g.same_size(size, 1) and not g.same_size(stride, expected):
            return False
        expected = expected * size
    return True


def _note(site: Site, found: InPlace | None) -> str:
    copies = [not operand.is_view for operand in operands(site)] if found is None else [given.is_copied for given in found.given]
    how = f"{sum(copies)} factors are copied" if found is None or any(copies) else "the factors are read where they lie"
    if site.sizes is None:
        return f"as a matrix product; {how}"
    m, n, k = site.count(site.free_x), site.count(site.free_y), site.count(site.summed)
    chunks = f", summed over {site.count(site.chunked)} chunks" if site.chunked else ""
    if isinstance(site.x, Folded) and site.x.padded is not None:
        chunks += f", padded to {k * site.count(site.chunked)} terms"
    return f"{site.count((*site.batch, *site.chunked))} matrix products {m}x{n}x{k}{chunks}; {how}"
