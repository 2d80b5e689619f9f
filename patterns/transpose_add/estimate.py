"""What a sum makes a device do: in the kernel, and in Inductor's."""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.permute.estimate import ACROSS_MEMORY
from fusebackend.patterns.permute.tile_work import tile_work
from fusebackend.patterns.transpose_add.sites import Sum, is_transposed
from fusebackend.rewriting.pattern import Generated, Work, Workload
from fusebackend.rewriting.workload import alignment, log2, log2_run, stream

aten = torch.ops.aten

# Operators whose generated template takes pointwise epilogues when Inductor autotunes: fused_neighbours takes them for library calls.
_TEMPLATES = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default})


def workload(site: Sum) -> Workload:
    """That of a sum by ``transpose_add``, and of what Inductor makes of it."""
    neighbours = g.fused_neighbours(site.node) + _autotuned_templates(site)
    ours = [_ours(site), *map(stream, neighbours)]
    inductor = Generated((site.node,), family=ACROSS_MEMORY) if site.out.device.type != "cpu" else Work("sum cpu", *_geometry(site))
    return Workload(tuple(ours), (inductor,), neighbours[0] if neighbours else None)


def _autotuned_templates(site: Sum) -> list:
    from torch._inductor import config

    if not (config.max_autotune or config.max_autotune_gemm):
        return []
    return [p for p in map(g.through_views, site.node.all_input_nodes) if p.target in _TEMPLATES and len(p.users) == 1]


def _ours(site: Sum) -> Work:
    if site.out.device.type == "cpu":
        return Work("transpose_add cpu", *_geometry(site))
    return tile_work("transpose_add", site.out, g.memory_order(site.out), *site.operands)


def _geometry(site: Sum) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape of a sum, for loops whose ways are not known further."""
    out = site.out
    transposed = next(t for t in site.operands if is_transposed(t, out))
    sizes = g.hints(out.shape)
    full = tuple(transposed.shape) == tuple(out.shape)
    out_order = [d for d in g.memory_order(out) if sizes[d] != 1]
    source_order = [d for d in g.memory_order(transposed) if sizes[d] != 1] if full else out_order
    source_run = g.run_length(sizes, source_order, out_order) * out.itemsize
    out_run = g.run_length(sizes, out_order, source_order) * out.itemsize
    elements = math.prod(sizes)
    quantities = {
        "bytes": 3.0 * elements * out.itemsize,
        "elements": float(elements),
        "runs": elements * out.itemsize / min(source_run, out_run),
    }
    shape = {
        "log2 itemsize": log2(out.itemsize),
        "16 bits": float(out.dtype in (torch.float16, torch.bfloat16)),
        "log2 result run": log2_run(out_run),
        "log2 source run": log2_run(source_run),
        "result alignment": alignment(out_run),
        "source alignment": alignment(source_run),
        "broadcast": float(not full),
        "dynamic": float(not all(isinstance(n, int) for n in (*out.shape, *transposed.stride()))),
    }
    return quantities, shape
