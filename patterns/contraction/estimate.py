"""What a sum of products makes a device do: as the loop that Inductor generates, and as a matrix product with the copies that it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.work import sum_over_rows
from fusebackend.patterns.contraction.chunks import groups_of_chunks
from fusebackend.patterns.contraction.factors import Folded
from fusebackend.patterns.contraction.in_place import InPlace
from fusebackend.patterns.contraction.legality import goes_away
from fusebackend.patterns.contraction.operands import Operand, is_in_order, operands
from fusebackend.patterns.contraction.sites import Site
from fusebackend.patterns.strided_bmm.work import strided_product
from fusebackend.rewriting.library_product import library_product
from fusebackend.rewriting.pattern import Estimate, Generated, Match, Work, Workload
from fusebackend.rewriting.workload import log2, log2_run

aten, prims = torch.ops.aten, torch.ops.prims

#: Further operators that Inductor computes where their result is read.
_INLINED = (
    *(aten.cat.default, aten.constant_pad_nd.default, aten.clone.default, aten.full.default),
    *(prims.iota.default, prims.convert_element_type.default),
)
#: Of longer chains Inductor keeps a part in memory.
_MOST_NODES = 64


def estimate(site: Site, found: InPlace | None, by_library: Match) -> Estimate | Workload | Sequence[Workload]:
    """The work of ``site`` both ways, or why a matrix product can't pay.

    Args:
        found: how it is computed in place, if it can be.
        by_library: the same site with a library's product.
    """
    if site.sizes is None:
        return Estimate(False, "a size depends on data, so it is not known whether a matrix product pays", "unmeasured")
    other = next((u for u in site.other_users if not goes_away(u)), None)
    if other is not None:
        return Estimate(False, f"the product is computed all the same, for {g.describe(other)}", "fused_neighbour", other)
    if site.device.type == "cpu" and not _has_cpu_library(site.dtype):
        return Estimate(False, f"PyTorch multiplies {site.dtype} matrices element by element on this CPU")
    ours = [_matrix_product(site), *_sums_of_chunks(site)]
    library = Workload(tuple(ours), (_original(site.undivided or site),))
    if found is None:
        return library
    return [_in_place(site, found, library), dataclasses.replace(library, match=by_library, is_alternative=True)]


def _in_place(site: Site, found: InPlace, library: Workload) -> Workload:
    """The product by ``strided_bmm``. What Inductor would compute in its loop is written in any order, as a library reads it, too."""
    site = site.undivided or site
    written = [given for given in found.given if given.is_copied or _is_computed_in_loop(site, given.operand)]
    computed = [site.count(given.operand.factor.dims) for given in written]
    untimed = "a product by itself does not tell, since Inductor writes computed operands as a library reads them" if computed else ""
    return dataclasses.replace(library, ours=(strided_product(found.layout, site.device, computed),), untimed=untimed)


def _matrix_product(site: Site) -> Work:
    """The product by a library, with a kernel for each operand that is copied or computed first, and for a result in another order."""
    both = operands(site)
    groups = ((*site.batch, *site.chunked), site.free_x, site.free_y, site.summed)
    batch, m, n, k = (site.count(dims) for dims in groups)
    reordered = batch * m * n * site.count(site.repeated) if not site.chunked and not is_in_order(site) else 0
    return library_product(
        (batch, m, n, k),
        site.dtype,
        site.device,
        copied=[site.count(operand.factor.dims) for operand in both if not operand.is_view],
        computed=_computed(site),
        reordered=reordered,
        by_columns=(both[0].is_transposed, both[1].is_transposed),
        dynamic=_is_dynamic(site),
    )


def _computed(site: Site) -> list[int]:
    """The elements of the operands that lie as they are read, but that Inductor would compute in its loop."""
    return [site.count(o.factor.dims) for o in operands(site) if o.is_view and _is_computed_in_loop(site, o)]


def _sums_of_chunks(site: Site) -> list[Work]:
    """The sums of the chunks' results, which Inductor generates."""
    batch, chunks, elements = (site.count(dims) for dims in (site.batch, site.chunked, (*site.free_x, *site.free_y)))
    steps = groups_of_chunks(site) or [(1, chunks)] if site.chunked else []
    return [sum_over_rows(batch * groups, n, elements, site.dtype, site.device, bool(_is_dynamic(site))) for groups, n in steps]


def _original(site: Site) -> Work | Generated:
    """What Inductor makes of the sum: it is asked on a GPU, where what its kernels do decides; described otherwise."""
    if site.device.type == "cpu":
        return _loop(site)
    return Generated(loop_nodes(site), (site.node,), otherwise=_loop(site))


def _loop(site: Site) -> Work:
    """Each product is computed by itself; its factors come from caches where they are read again."""
    assert site.sizes is not None
    larger, smaller = sorted(operands(site), key=lambda operand: -site.count(operand.factor.dims))
    products, size = site.count(range(len(site.sizes))), site.dtype.itemsize
    summed = max(site.count(site.summed), 1)
    outputs, padded = products // summed, 1 << (summed - 1).bit_length()  # a short sum is computed at once, in a block of 2^n elements
    elements = [site.count(operand.factor.dims) for operand in (larger, smaller)]
    quantities = {
        "products": float(products),
        "padded products": float(outputs * padded),
        "outputs": float(outputs),
        "bytes": float(size * (sum(elements) + outputs)),
        "loaded bytes": 2.0 * size * products,
    }
    order = [d for dims in site.result_dims for d in dims]
    innermost = order[-1]
    shape = {
        "log2 summed": log2(summed),
        "log2 padded": log2(padded / summed),
        "log2 outputs": log2(outputs),
        "log2 row of the result": log2_run(size * site.sizes[innermost]),
        "log2 itemsize": log2(size),
        "factors": float(2 + len(site.parts)),
        "dynamic": _is_dynamic(site),
    }
    for name, operand, count in zip(("larger", "smaller"), (larger, smaller), elements):
        shape |= _seen_by_loop(site, name, operand, count, products, innermost)
    return Work(f"sum of products{_suffix(site)}", quantities, shape)


def loop_nodes(site: Site) -> tuple[fx.Node, ...]:
    """The sum with all that Inductor computes inside its loop: the products, and what computes the factors element by element."""
    found = {site.node, *site.between, site.product, *site.parts}
    stack = [i for node in found for i in node.all_input_nodes]
    while stack and len(found) < _MOST_NODES:
        node = stack.pop()
        if node not in found and (g.is_view(node) or _is_inlined(node)):
            found.add(node)
            stack += node.all_input_nodes
    return tuple(sorted(found))


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor computes ``node`` where it is read: an elementwise operation whose result is no output of the graph."""
    if not g.is_fusable(node) or not g.is_tensor(node) or any(user.op == "output" for user in node.users):
        return False
    target: Any = node.target
    return torch.Tag.pointwise in target.tags or target in _INLINED


def _seen_by_loop(site: Site, name: str, operand: Operand, count: int, products: int, innermost: int) -> dict[str, float]:
    """How a loop over the result's elements reads a factor: what its rows run along, and how often each element is read."""
    assert site.sizes is not None
    factor = operand.factor
    row = max(factor.dims, key=factor.axis_order)
    return {
        f"log2 reads of the {name}": log2(products / count),
        f"log2 row of the {name}": log2_run(site.dtype.itemsize * site.sizes[row]),
        f"rows of the {name} are summed": float(row in site.summed),
        f"rows of the {name} are the result's": float(row == innermost),
        f"the {name} is computed": float(factor.is_computed or _is_computed_in_loop(site, operand)),
    }


def _is_computed_in_loop(site: Site, operand: Operand) -> bool:
    """Whether Inductor computes the factor inside the loop, from what is in memory: a matrix product needs it there itself."""
    factor = operand.factor
    if isinstance(factor, Folded):
        return True
    source = g.through_views(factor.source)
    return g.is_fusable(source) and all(user in (site.product, *site.parts, *factor.elementwise) for user in g.consumers(source))


def _is_dynamic(site: Site) -> float:
    return float(any(isinstance(s, torch.SymInt) for s in g.value(site.product).shape))


def _suffix(site: Site) -> str:
    return " cpu" if site.device.type == "cpu" else ""


def _has_cpu_library(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies 16-bit matrices on this CPU; others MKL does."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype != torch.float16 or torch.ops.mkldnn._is_mkldnn_fp16_supported()
