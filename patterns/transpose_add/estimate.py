"""Whether a sum pays: rules that were fitted to timings of random shapes on an H200 and on two CPU cores (README.md has the figures)."""

from __future__ import annotations

import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.transpose_add.sites import Sum, is_transposed
from fusebackend.rewriting.pattern import Estimate

aten = torch.ops.aten

# Operators whose generated template takes pointwise epilogues when Inductor autotunes.
_TEMPLATES = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default})

_SECTOR = 32  # bytes that a GPU's memory moves at once

# Bytes of the result on CUDA, and elements on a CPU, below which the call of an operator takes as long as the sum does.
_MIN_BYTES_CUDA, _MIN_ELEMENTS_CPU = 2 << 20, 1 << 15
# Bytes below which Inductor's loop may be as fast on a GPU, at symbolic and at static sizes.
_MIN_BYTES_DYNAMIC, _MIN_BYTES_STATIC = 12 << 20, 24 << 20
# Elements of rows and columns from which on the kernel was faster at static sizes.
_MIN_STATIC_PLANE = 2048


def estimate_sum(site: Sum) -> Estimate:
    """Whether it pays to compute ``site`` by ``transpose_add``."""
    neighbour = g.fused_neighbour(site.node)
    if neighbour is not None:
        return Estimate(False, f"Inductor fuses it with its neighbour {g.describe(neighbour)}", "fused_neighbour")
    template = _autotuned_template(site.node)
    if template is not None:
        return Estimate(False, f"under max-autotune Inductor may add in the epilogue of {g.describe(template)}", "fused_neighbour")
    reason = _as_fast_with_max_autotune(site.out) or _as_fast_on_gpu(site.out)
    if reason:
        return Estimate(False, reason)
    unmeasured = unmeasured_reason(site.operands, site.out)
    return Estimate(None, unmeasured, "unmeasured") if unmeasured else Estimate()


def _autotuned_template(node: fx.Node) -> fx.Node | None:
    from torch._inductor import config

    if not (config.max_autotune or config.max_autotune_gemm):
        return None
    return next((p for p in map(g.through_views, node.all_input_nodes) if p.target in _TEMPLATES and len(p.users) == 1), None)


def _as_fast_with_max_autotune(out: torch.Tensor) -> str:
    """With tuned tiles Inductor is within 5 % of a contiguous add at static sizes, unless rows of 16-bit elements begin at odd ones."""
    from torch._inductor import config

    if not config.max_autotune or out.device.type != "cuda" or not all(isinstance(s, int) for s in out.shape):
        return ""
    if any(s * out.itemsize % 4 for s in out.shape if s > 1):
        return ""
    return "under max-autotune Inductor's kernel for these static, aligned sizes is as fast"


def _as_fast_on_gpu(out: torch.Tensor) -> str:
    if out.device.type == "cpu":
        return ""
    total = math.prod(g.hints(out.shape)) * out.itemsize
    if total < _MIN_BYTES_CUDA:
        return f"{total} bytes: calling an operator takes as long as adding them"
    if out.itemsize >= 4 and all(isinstance(s, int) and (s % 32 == 0 or s == 1) for s in out.shape):
        return "static, even sizes of elements of 4 and more bytes: Inductor's tiles are as fast"
    return ""


def unmeasured_reason(operands: tuple[torch.Tensor, ...], out: torch.Tensor) -> str:
    """Why it is not known that Inductor's loop is slower; empty if it is."""
    sizes = g.hints(out.shape)
    transposed = next(t for t in operands if is_transposed(t, out))
    if tuple(transposed.shape) != tuple(out.shape):
        return "a broadcast operand: not measured"
    out_order, source_order = ([d for d in g.memory_order(t) if sizes[d] != 1] for t in (out, transposed))
    source_run, out_run = g.run_length(sizes, source_order, out_order), g.run_length(sizes, out_order, source_order)
    static = all(isinstance(n, int) for n in (*out.shape, *transposed.stride()))
    if out.device.type == "cpu":
        return _unmeasured_on_cpu(math.prod(sizes), out.itemsize, source_run, out_run, static)
    total = math.prod(sizes) * out.itemsize
    if static:
        return _unmeasured_static(total, out.itemsize, source_run, out_run)
    inside = math.prod(sizes[d] for d in out_order[out_order.index(source_order[-1]) + 1 :])
    return _unmeasured_dynamic(total, out.itemsize, source_run, out_run, is_plane=inside == out_run)


def _unmeasured_static(total: int, itemsize: int, source_run: int, out_run: int) -> str:
    if itemsize >= 4:
        return "static sizes of elements of 4 and more bytes: Inductor's tiles may be as fast"
    if min(source_run, out_run) < _MIN_STATIC_PLANE:
        return f"static sizes, rows or columns below {_MIN_STATIC_PLANE}: Inductor's tiles are as fast"
    # Where rows of the source begin within sectors, Inductor's tiles read a quarter more. Such rows of the result cost our kernel, too.
    least = _MIN_BYTES_STATIC if out_run * itemsize % _SECTOR == 0 else 2 * _MIN_BYTES_STATIC
    if source_run * itemsize % _SECTOR == 0 or total < least:
        return "static sizes, few bytes or rows that begin at sectors of memory: Inductor's tiles may be as fast"
    return ""


def _unmeasured_dynamic(total: int, itemsize: int, source_run: int, out_run: int, is_plane: bool) -> str:
    """``is_plane``: no other dims lie between the two sides."""
    short, long = sorted((source_run, out_run))
    if total < (_MIN_BYTES_DYNAMIC if itemsize < 4 else 2 * _MIN_BYTES_DYNAMIC) or short < 64 or long < 256:
        return "dynamic sizes, short rows or few bytes: Inductor's loop may be as fast"
    if is_plane and short < 128:
        return "dynamic sizes, planes with a side below 128: Inductor's loop may be as fast"
    if itemsize >= 4 and short >= 128:
        return "dynamic sizes, large planes of 4 and more bytes an element: Inductor's loop is as fast"
    return ""


def _unmeasured_on_cpu(elements: int, itemsize: int, source_run: int, out_run: int, static: bool) -> str:
    """Inductor transposes squares in wider registers than the kernel's. It adds element by element where rows of the result are short;
    under symbolic sizes, also where those of the source are."""
    if elements < _MIN_ELEMENTS_CPU:
        return f"{elements} elements on a CPU: calling an operator takes as long as adding them"
    if itemsize == 2 and out_run <= 4 or not static and itemsize <= 4 and min(source_run, out_run) <= 4:
        return ""
    return "rows are long, or elements are not of 16 bits: Inductor's loop on a CPU may be as fast"
