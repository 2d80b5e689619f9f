"""What sums over outer dims make a device do: in the kernels, and in Inductor's.

Inductor computes what is summed inside its sum, and divides long sums among more threads by a second kernel. It does not where no load
tells it how to go on along the sum, that is where all are indirect: then only the columns are shared out, and each block walks over all
rows. A factor that is read directly is enough. Sums that read the same tensors it computes in one pass, where their loops fit: one of
them by itself costs it little more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.groups import Nested, Together
from fusebackend.patterns.column_sum.ops import wide_dtype
from fusebackend.patterns.column_sum.producers import Producer, other_reductions, producer_of
from fusebackend.patterns.column_sum.sites import SUMS, Site, between, read
from fusebackend.patterns.column_sum.work import Pass, contiguous, is_dynamic, shape_of
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Generated, Work, Workload
from fusebackend.rewriting.workload import log2, stream, streamed


def estimate(found: Site | Together | Nested) -> Estimate | Workload:
    sums = (found,) if isinstance(found, Site) else found.sums
    value = g.value(sums[0].source)
    sizes = g.hints((*value.shape, *value.stride()))
    if sizes is None:
        return Estimate(None, "a size depends on data, so it is not known whether the sum pays", "unmeasured")
    if 0 in sizes[: value.dim()]:
        return Estimate(False, "an empty tensor: nothing to gain")
    sources = found.sources if isinstance(found, Together) else (sums[0].source,)
    inside = {n for site in sums for n in between(site, sources)}
    producer = producer_of(*sources, inside=inside)
    computed = [n for n in sources if n in producer.nodes]
    neighbours = [n for source in sources if source not in computed for n in _fused_neighbours(source, inside)]
    ours: list[Work | Generated] = [*_kernels(found), *map(stream, neighbours)]
    if computed:
        ours.append(_materialised(sums[0], computed, inside))
    nodes = {s.node for s in sums}
    reads = _loops(sorted(nodes)).producer
    others = [] if reads.is_indirect else other_reductions(nodes, reads.tensors)
    passes = [p for p in _passes([*nodes, *others]) if not nodes.isdisjoint(p.reductions)]
    if value.device.type == "cpu" and not all(p.sums for p in passes):
        return Estimate(None, "of reductions of other kinds that read the same tensor it is not known how long they take", "unmeasured")
    left = [n for p in passes for n in p.reductions if n not in nodes]  # they stay with Inductor
    works = [p.work() for p in _passes(left)]
    stay = [dataclasses.replace(work, around=True) for work in works if isinstance(work, Work)]
    ours += [*stay, *(work for work in works if isinstance(work, Generated))]
    # Along reductions of other kinds sums take no longer than by themselves.
    alone = () if all(p.sums for p in passes) else (*(p.described() for p in _passes([*nodes])), *stay)
    shown = producer.nodes[-1] if computed else next(iter((*neighbours, *left)), None)
    return Workload(tuple(ours), tuple(p.work() for p in passes), shown, spared=alone)


# ---- by Inductor ----


@dataclasses.dataclass(frozen=True)
class _Loops:
    """Reductions that Inductor may compute in one pass.

    Attributes:
        reductions: they.
        sums: the same, where all are sums over the same outer dims; empty otherwise.
        producer: what is computed inside them.
        casts: between that and them.
    """

    reductions: tuple[fx.Node, ...]
    sums: tuple[Site, ...]
    producer: Producer
    casts: tuple[fx.Node, ...]

    def work(self) -> Work | Generated:
        """Of what is computed inside a sum, and of several sums, Inductor is asked. Of gathers its code tells which rows a block reads only
        once it runs: they are described, and so is one sum of what is only read."""
        described = self.described() if self.sums else None
        asked = Generated((*self.producer.nodes, *self.casts, *self.reductions), self.reductions, described)
        if described is None:
            return asked
        is_told = self.producer.is_indirect or g.value(self.reductions[0]).device.type == "cpu"
        return described if is_told or not (self.producer.nodes or len(self.sums) > 1) else asked

    def described(self) -> Work:
        """By what they read and compute."""
        site, value = self.sums[0], g.value(self.sums[0].source)
        sizes = g.hints([value.shape[d] for d in site.order]) or []
        elements, rows = float(math.prod(sizes)), float(math.prod(sizes[site.begin : site.end]))
        nodes = float(sum(not g.is_view(n) for n in self.producer.nodes))
        quantities = {
            "written": elements / rows * sum(g.value(s.node).itemsize for s in self.sums),
            "read": self.producer.read,
            "gathered": self.producer.gathered,
            "computed": elements * nodes,
            "launches": 1.0,
        }
        shape = shape_of(sizes, site.begin, site.end, value.dtype, is_dynamic(value))
        is_undivided = self.producer.is_indirect and not self.producer.reads_all_of(elements)
        shape |= {"nodes": log2(1 + nodes), "gathers": float(is_undivided)}
        if value.device.type == "cpu":
            quantities["elements"] = elements
            return Work("inductor column sum cpu", quantities, {**shape, "threads": log2(torch.get_num_threads())})
        if is_undivided:
            # One row after the other, by as many threads as there are columns. More columns than threads run at once take turns.
            threads = device_facts(value.device).multiprocessors * 2048
            quantities["steps"] = rows * max(1.0, elements / rows / threads)
        return Work("inductor column sum", quantities, shape)


def _passes(reductions: Sequence[fx.Node]) -> list[_Loops]:
    """Reductions that read the same tensors, by the passes in which Inductor computes them: sums over the same outer dims in one. Those of
    other kinds it may compute along."""
    whole = _loops(sorted(reductions))
    places = [read(n) if n.target in SUMS else None for n in whole.reductions]
    if not reductions or not all(isinstance(s, Site) for s in places):
        return [whole] if reductions else []
    passes: dict[tuple, list[fx.Node]] = {}
    for node, site in zip(whole.reductions, places):
        assert isinstance(site, Site)
        passes.setdefault((site.order, site.begin, site.end), []).append(node)
    return [_loops(nodes) for nodes in passes.values()]


def _loops(reductions: Sequence[fx.Node]) -> _Loops:
    found = [read(n) if n.target in SUMS else None for n in reductions]
    sums = [s for s in found if isinstance(s, Site)]
    alike = len(sums) == len(reductions) and len({(s.order, s.begin, s.end) for s in sums}) == 1
    sources, casts = set[fx.Node](), set[fx.Node]()
    for node, site in zip(reductions, found):
        if isinstance(site, Site):
            sources.add(site.source)
            casts |= between(site, [site.source]) - {node}
        else:
            sources |= {n for n in node.all_input_nodes if g.is_tensor(n)}
    producer = producer_of(*sources, inside={*reductions, *casts})
    return _Loops(tuple(reductions), tuple(sums) if alike else (), producer, tuple(sorted(casts)))


def _fused_neighbours(source: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Nodes that compute the summed tensor for other users too, none of which needs it as a tensor: ours makes it one."""
    source = g.through_views(source)
    if not g.is_fusable(source):
        return []
    others = [u for u in g.consumers(source) if u not in inside]
    return [source] if all(map(g.is_fusable, others)) else []


# ---- by the kernels ----


def _kernels(found: Site | Together | Nested) -> list[Work]:
    if isinstance(found, Together):
        y = None if found.y is None else g.value(found.y)
        return [Pass.over(found.sums, g.value(found.x), y, plain=found.plain is not None, products=True).work()]
    if isinstance(found, Site):
        return [Pass.over([found], g.value(found.source)).work()]
    value, out = g.value(found.inner.source), g.value(found.inner.node)
    wide = wide_dtype(value.dtype, out.dtype)
    first = dataclasses.replace(Pass.over([found.inner], value), results=(wide,))
    of_sums = dataclasses.replace(
        first,
        sizes=first.kept,
        strides=contiguous(first.kept),
        begin=found.begin,
        end=found.end,
        dtype=wide,
        results=(g.value(found.outer.node).dtype,),
        misaligned=0,
    )
    if out.dtype is wide:
        return [first.work(), of_sums.work()]
    cast = streamed(float(math.prod(first.kept) * (wide.itemsize + out.itemsize)), out)
    return [first.work(), of_sums.work(), cast]


def _materialised(site: Site, computed: Collection[fx.Node], inside: set[fx.Node]) -> Work:
    """The kernel that computes what is summed."""
    value, producer = g.value(site.source), producer_of(*computed, inside=inside)
    sizes = g.hints([value.shape[d] for d in site.order]) or []
    written = float(math.prod(sizes) * sum(g.value(n).itemsize for n in computed))
    suffix = " cpu" if value.device.type == "cpu" else ""
    quantities = {"bytes": producer.read + written, "gathered": producer.gathered}
    shape = shape_of(sizes, site.begin, site.end, value.dtype, is_dynamic(value))
    return Work(f"column_sum input{suffix}", quantities, shape, around=True)
