"""What a sum of products makes a device do: as the loop that Inductor generates, and as a matrix product with the copies that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.work import sum_over_rows
from fusebackend.patterns.contraction.factors import Folded
from fusebackend.patterns.contraction.in_place import InPlace
from fusebackend.patterns.contraction.legality import goes_away
from fusebackend.patterns.contraction.operands import Operand, is_in_order, operands
from fusebackend.patterns.contraction.sites import Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Generated, Work, Workload
from fusebackend.rewriting.workload import alignment, library_tiles, log2, log2_run

aten, prims = torch.ops.aten, torch.ops.prims

#: Further operators that Inductor computes where their result is read.
_INLINED = (
    *(aten.cat.default, aten.constant_pad_nd.default, aten.clone.default, aten.full.default),
    *(prims.iota.default, prims.convert_element_type.default),
)
#: Rows and columns of the result that a block of a library's kernel computes.
_LIBRARY_TILE = 128
#: What a product in place moves at most of what it would save to pay: a library's kernel is the faster one by itself.
_CLEARLY_LESS = 2 / 3
#: Of longer chains Inductor keeps a part in memory.
_MOST_NODES = 64


def estimate(site: Site) -> Estimate | Workload:
    """The work of ``site`` both ways, or why a matrix product can't pay."""
    if site.sizes is None:
        return Estimate(False, "a size depends on data, so it is not known whether a matrix product pays", "unmeasured")
    other = next((u for u in site.other_users if not goes_away(u)), None)
    if other is not None:
        return Estimate(False, f"the product is computed all the same, for {g.describe(other)}", "fused_neighbour", other)
    if site.device.type == "cpu" and not _has_cpu_library(site.dtype):
        return Estimate(False, f"PyTorch multiplies {site.dtype} matrices element by element on this CPU")
    ours = [_matrix_product(site)]
    if site.chunked:
        ours.append(_sum_of_chunks(site))
    return Workload(tuple(ours), (_original(site.undivided or site),))


def _matrix_product(site: Site) -> Work:
    """The product itself, and a kernel for each operand that is copied or computed first, and for a result in another order.

    What is computed in place (:mod:`fusebackend.patterns.contraction.in_place`) moves less: for that it is a bound.
    """
    both = operands(site)
    groups = ((*site.batch, *site.chunked), site.free_x, site.free_y, site.summed)
    batch, m, n, k = (site.count(dims) for dims in groups)
    size, result = site.dtype.itemsize, batch * m * n
    copied = [operand for operand in both if not operand.is_view]
    computed = [operand for operand in both if operand.is_view and _is_computed_in_loop(site, operand)]
    reordered = result * site.count(site.repeated) if not site.chunked and not is_in_order(site) else 0
    quantities = {
        f"flops in {8 * size} bits": 2.0 * batch * m * n * k,
        "bytes": float(size * (batch * (m * k + n * k) + result)),
        "copied bytes": 2.0 * size * sum(site.count(operand.factor.dims) for operand in copied),
        "computed bytes": 2.0 * size * sum(site.count(operand.factor.dims) for operand in computed),
        "reordered bytes": 2.0 * size * reordered,
        "launches": float(1 + len(copied) + len(computed) + bool(reordered)),
    }
    shape = {
        **{f"log2 {name}": log2(count) for name, count in zip(("batch", "m", "n", "k"), (batch, m, n, k))},
        **{f"{name} alignment": alignment(size * count) for name, count in zip("mnk", (m, n, k))},
        "log2 shorter": log2(min(m, n)),
        "log2 flops per byte": log2(m * n * k / (m * k + k * n + m * n)),
        "x by columns": float(both[0].is_transposed),
        "y by columns": float(both[1].is_transposed),
        "copies": float(len(copied)),
        "log2 itemsize": log2(size),
        "dynamic": _is_dynamic(site),
    }
    if site.device.type == "cuda":
        multiprocessors = device_facts(site.device).multiprocessors
        for tile, tiles, waves in library_tiles(batch, m, n, multiprocessors):
            quantities[f"depth in waves of {tile}"] = float(waves * k)
            shape[f"log2 waves of {tile}"] = log2(tiles / multiprocessors)
            shape[f"log2 padded to {tile}"] = log2(tiles * tile * tile / (batch * m * n))
    return Work(f"contraction{_suffix(site)}", quantities, shape)


def moves_less(site: Site, found: InPlace) -> bool:
    """Whether a product in place moves clearly less than the library's with the copies that it saves.

    An operand is read once for each tile along the other's free dim: here by small tiles, which are computed whole, by a library behind
    copies. Where Inductor computes an operand, it writes it as the library reads it; and it reads a result in any order. In fp32 a result
    whose batch is innermost takes the kernel longer than a library with its copies.
    """
    if site.dtype == torch.float32 and found.layout.is_batch_innermost:
        return False
    tile, library = found.layout.tile, (_LIBRARY_TILE, _LIBRARY_TILE)
    counts = [site.count(dims) for dims in (found.layout.rows, found.layout.columns)]
    sizes = [site.count(operand.factor.dims) for operand in found.operands]
    if found.layout.swapped:
        sizes.reverse()
    padded = [size * side * -(-count // side) / count for size, count, side in zip(sizes, counts, tile)]

    def moved(elements: Sequence[float], sides: tuple[int, int]) -> float:
        return sum(n * -(-count // side) for n, count, side in zip(elements, reversed(counts), reversed(sides)))

    result = site.count((*site.batch, *site.free_x, *site.free_y))
    copied = sum(
        2 * site.count(operand.factor.dims) for operand in found.operands if not operand.is_view and not _is_computed_in_loop(site, operand)
    )
    reordered = 0 if is_in_order(site) or g.is_read_by_loops(site.node) else 2 * result
    return moved(padded, tile) + result <= _CLEARLY_LESS * (moved(sizes, library) + result + copied + reordered)


def _sum_of_chunks(site: Site) -> Work:
    """The sum of the chunks' results, which Inductor generates."""
    batch, chunks, elements = (site.count(dims) for dims in (site.batch, site.chunked, (*site.free_x, *site.free_y)))
    return sum_over_rows(batch, chunks, elements, site.dtype, site.device, bool(_is_dynamic(site)))


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
