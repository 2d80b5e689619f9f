"""What a sum over outer dims makes a device do: in the kernels, and in Inductor's.

Inductor computes what is summed inside its sum, and divides long sums among more threads by a second kernel. It does not where it can't
tell how the loads go on along the sum, that is behind indirect loads: then only the columns are shared out, and each block walks over all
rows.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.ops import plan_facts
from fusebackend.patterns.column_sum.sites import Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Work, Workload
from fusebackend.rewriting.workload import log2, log2_run, stream

aten = torch.ops.aten

_MOST_NODES = 64  # of what computes a summed tensor; behind more it has become a tensor anyway
#: Loads from places that the graph computes.
_INDIRECT = frozenset(
    {
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten._unsafe_masked_index.default,
        aten.gather.default,
        aten.index_select.default,
        aten.embedding.default,
    }
)


@dataclasses.dataclass(frozen=True)
class Producer:
    """What computes the summed tensor inside Inductor's sum.

    Attributes:
        nodes: the pointwise nodes, and views between them, of which nothing else uses a value; none if the tensor is there already.
        read: bytes of what they read, that of indirect loads left out.
        gathered: bytes of elements that are loaded indirectly.
    """

    nodes: tuple[fx.Node, ...]
    read: float
    gathered: float

    @property
    def is_indirect(self) -> bool:
        return any(n.target in _INDIRECT for n in self.nodes)


def producer_of(source: fx.Node) -> Producer:
    """What computes ``source``, if Inductor would do so inside the sum alone."""
    nodes: dict[fx.Node, None] = {}
    reads: dict[fx.Node, None] = {}
    gathered = 0.0
    pending = [source]
    while pending:
        node = pending.pop()
        inside = g.is_fusable(node) or (g.is_view(node) and _owner_is_computed(node))
        if not inside or len(nodes) >= _MOST_NODES or not all(u in nodes or node is source for u in node.users):
            reads[node] = None
            continue
        if node is source and len(node.users) > 1:  # it becomes a tensor anyway, or is computed twice
            reads[node] = None
            continue
        nodes[node] = None
        inputs = node.all_input_nodes
        if node.target in _INDIRECT:
            gathered += _bytes(node)
            table, inputs = inputs[0], inputs[1:]
            del table  # a part of it is read, again and again: that counts as gathered
        pending += inputs
    return Producer(tuple(sorted(nodes)), sum(_bytes(n) for n in reads), gathered)


def _owner_is_computed(view: fx.Node) -> bool:
    return g.is_fusable(g.through_views(view))


def _bytes(node: fx.Node) -> float:
    """Of a tensor as it lies in memory: what is expanded is there once."""
    value = g.value(node)
    if not isinstance(value, torch.Tensor):
        return 0.0
    sizes, strides = g.hints(value.shape) or [], g.hints(value.stride()) or []
    return float(math.prod(n for n, s in zip(sizes, strides) if s != 0) * value.itemsize)


def estimate(site: Site) -> Estimate | Workload:
    value = g.value(site.source)
    sizes, strides = (g.hints([of[d] for d in site.order]) for of in (value.shape, value.stride()))
    if sizes is None or strides is None:
        return Estimate(None, "a size depends on data, so it is not known whether the sum pays", "unmeasured")
    if 0 in sizes:
        return Estimate(False, "an empty tensor: nothing to gain")
    producer = producer_of(site.source)
    neighbours = [] if producer.nodes else _fused_neighbours(site)
    ours = [_ours(site, sizes, strides), *map(stream, neighbours)]
    if producer.nodes:
        ours.append(_materialised(site, sizes, producer))
    shown = producer.nodes[-1] if producer.nodes else neighbours[0] if neighbours else None
    return Workload(tuple(ours), (_inductor(site, sizes, producer),), shown)


def _fused_neighbours(site: Site) -> list[fx.Node]:
    """Nodes that compute the summed tensor for other users too, none of which needs it as a tensor: ours makes it one."""
    source = g.through_views(site.source)
    if not g.is_fusable(source):
        return []
    others = [u for u in g.consumers(source) if u is not site.node]
    return [source] if all(map(g.is_fusable, others)) else []


def _facts(site: Site, sizes: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape that all descriptions share."""
    value, out = g.value(site.source), g.value(site.node)
    rows, columns = (float(math.prod(sizes[a:b])) for a, b in ((site.begin, site.end), (site.end, len(sizes))))
    batch = float(math.prod(sizes[: site.begin]))
    quantities = {"written": batch * columns * out.itemsize}
    is_dynamic = not all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return quantities, _shape(batch, rows, columns, value.dtype, is_dynamic)


def _ours(site: Site, sizes: list[int], strides: list[int]) -> Work:
    value, out = g.value(site.source), g.value(site.node)
    quantities, shape = _facts(site, sizes)
    elements = float(math.prod(sizes))
    quantities["read"] = elements * value.itemsize
    if value.device.type == "cpu":
        return Work("column_sum cpu", {**quantities, "elements": elements}, {**shape, "threads": log2(torch.get_num_threads())})
    misaligned = (g.hint(value.storage_offset()) or 0) * value.itemsize % 16
    multiprocessors = device_facts(value.device).multiprocessors
    facts = plan_facts(sizes, strides, site.begin, site.end, value.dtype, out.dtype, multiprocessors, misaligned)
    sums = facts["partials"] * (8 if torch.float64 in (value.dtype, out.dtype) else 4)
    quantities |= {
        "partial": 2 * sums,
        "blocks": facts["blocks"],
        "loads": elements * value.itemsize / facts["vector_bytes"],
        "launches": 1.0 + (sums > 0),
    }
    shape |= {name.replace("_", " "): log2(facts[name]) for name in ("vector_bytes", "width", "lanes", "threads", "splits", "blocks")}
    return Work("column_sum", quantities, shape)


def _materialised(site: Site, sizes: list[int], producer: Producer) -> Work:
    """The kernel that computes what is summed."""
    value = g.value(site.source)
    _, shape = _facts(site, sizes)
    written = float(math.prod(sizes) * value.itemsize)
    suffix = " cpu" if value.device.type == "cpu" else ""
    return Work(f"column_sum input{suffix}", {"bytes": producer.read + written, "gathered": producer.gathered}, shape)


def _inductor(site: Site, sizes: list[int], producer: Producer) -> Work:
    value = g.value(site.source)
    quantities, shape = _facts(site, sizes)
    elements = float(math.prod(sizes))
    read = producer.read if producer.nodes else elements * value.itemsize
    computed = float(sum(not g.is_view(n) for n in producer.nodes))
    quantities |= {"read": read, "gathered": producer.gathered, "computed": elements * computed, "launches": 1.0}
    shape |= {"nodes": log2(1 + computed), "gathers": float(producer.is_indirect)}
    if value.device.type == "cpu":
        quantities["elements"] = elements
        return Work("inductor column sum cpu", quantities, {**shape, "threads": log2(torch.get_num_threads())})
    if producer.is_indirect:
        # Not divided: one row after the other, by as many threads as there are columns. More columns than threads run at once take turns.
        threads = device_facts(value.device).multiprocessors * 2048
        rows = float(math.prod(sizes[site.begin : site.end]))
        quantities["steps"] = rows * max(1.0, elements / rows / threads)
    return Work("inductor column sum", quantities, shape)


def sum_over_rows(batch: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device, is_dynamic: bool) -> Work:
    """What Inductor makes of the sum over the rows of ``batch`` contiguous matrices, which are in memory."""
    read, written = (float(batch * n * columns * dtype.itemsize) for n in (rows, 1))
    if device.type == "cpu":
        return Work("stream cpu", {"bytes": read + written}, {"log2 itemsize": log2(dtype.itemsize)})
    shape = _shape(batch, rows, columns, dtype, is_dynamic) | {"nodes": 0.0, "gathers": 0.0}
    quantities = {"written": written, "read": read, "gathered": 0.0, "computed": 0.0, "launches": 1.0}
    return Work("inductor column sum", quantities, shape)


def _shape(batch: float, rows: float, columns: float, dtype: torch.dtype, is_dynamic: bool) -> dict[str, float]:
    return {
        "rows": log2(rows),
        "columns": log2(columns),
        "batch": log2(batch),
        "log2 itemsize": log2(dtype.itemsize),
        "row": log2_run(columns * dtype.itemsize),
        "dynamic": float(is_dynamic),
    }
