"""permute -> add: ``x.transpose(...) + alpha * y`` in one pass that reads and writes whole cache lines.

Why it pays: the operands of such an add are contiguous along different dims, so whichever loop order is chosen, one of
them is read across the grain. PyTorch's kernel does just that (10x off a copy on an H200). Inductor tiles, but loses a
fifth of the bandwidth on even static shapes and more on odd or dynamic ones. The kernel here moves one operand through
shared memory in tiles, takes shapes at run time, and keeps 16-byte accesses where alignment allows.

The operator is looked for by memory order, not by spelling: an ``add`` (or ``sub``) whose full-size operand runs along
another dim than its result. The view itself stays in the graph, where it costs nothing.

    permute: f32[8, 512, 256] = aten.permute(x, [0, 2, 1])         permute = aten.permute(x, [0, 2, 1])
    add:     f32[8, 512, 256] = aten.add(permute, y, alpha=2)  ->  add = fusebackend.transpose_add(permute, y, 2.0, 0, [0, 2, 1])
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader, ops
from fusebackend.rewriting.pattern import Emitter, Match, Pattern, Reject

aten = torch.ops.aten

DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)

# Operators whose generated template takes pointwise epilogues when Inductor autotunes.
_TEMPLATES = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default})


def reference(x: torch.Tensor, y: torch.Tensor, alpha: float, ialpha: int, order: list[int]) -> torch.Tensor:
    """What the kernels compute, in PyTorch.

    Args:
        x, y: tensors of one dtype on one device, of shapes that broadcast to each other; any strides.
        alpha, ialpha: the factor of ``y``, for floating-point and for integer dtypes; the other one is not looked at.
        order: the result's dims from outermost to innermost in memory.

    Returns:
        ``x + alpha * y``, computed in fp32 for 16-bit floats and rounded once, laid out as
        ``torch.empty_permuted(shape, order)``. Bitwise what ``torch.add`` gives, but for 16-bit floats on the CPU with
        an alpha that is no power of two: there eager's kernel for strided operands rounds alpha, the product and the
        sum to 16 bits, its kernel for contiguous ones only the last; Inductor's code rounds once, as this does.
    """
    if not x.is_floating_point():
        out = torch.add(x, y, alpha=ialpha)
    elif x.itemsize == 2:
        out = torch.add(x.float(), y.float(), alpha=alpha).to(x.dtype)
    else:
        out = torch.add(x, y, alpha=alpha)
    return torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device).copy_(out)


def _fake(x: torch.Tensor, y: torch.Tensor, alpha: float, ialpha: int, order: list[int]) -> torch.Tensor:
    torch._check(x.dtype == y.dtype, lambda: f"transpose_add: x is {x.dtype} and y is {y.dtype}; one dtype is needed")
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


transpose_add = ops.define(
    "transpose_add(Tensor x, Tensor y, float alpha, int ialpha, int[] order) -> Tensor",
    fake=_fake,
)


class TransposeAdd(Pattern):
    """Matches ``aten.add.Tensor`` and ``aten.sub.Tensor`` of operands in different memory orders."""

    name = "transpose_add"
    anchors = (aten.add.Tensor, aten.sub.Tensor)

    def match(self, node: fx.Node) -> Match | Reject | None:
        call = g.arguments(node)
        x, y, alpha = call["self"], call["other"], call["alpha"]
        if not g.is_tensor(x) or not g.is_tensor(y):
            return None
        out, operands = g.value(node), (g.value(x), g.value(y))
        crossing = [_runs_across(t, out) for t in operands]
        permuted = next((n for n in (x, y) if n.target is aten.permute.default), None)
        if permuted is None and True not in crossing:
            return None

        dtypes = [t.dtype for t in operands]
        if dtypes[0] != dtypes[1] or out.dtype != dtypes[0]:
            return Reject(f"mixed dtypes: {dtypes[0]} and {dtypes[1]} give {out.dtype}; one dtype is accepted", node)
        if out.dtype not in DTYPES:
            return Reject(f"dtype {out.dtype} is not supported", node)
        if None in crossing or g.memory_order(out) is None:
            return Reject("sizes are not known before run time (unbacked symbols)", node)
        if True not in crossing:
            return Reject("the operands run along the same dim in memory: nothing is transposed", permuted)
        if len({t.device for t in operands}) > 1:
            return Reject(f"operands on different devices: {operands[0].device} and {operands[1].device}", node)
        if isinstance(alpha, fx.Node):
            return Reject("alpha is computed in the graph; a number is accepted", node)
        floating = out.dtype.is_floating_point
        if isinstance(alpha, complex) or (isinstance(alpha, float) and not floating) or (floating and abs(alpha) > 2**53):
            return Reject(f"alpha={alpha!r} is not accepted for {out.dtype}", node)

        neighbour = g.fused_neighbour(node)
        if neighbour is not None:
            return Reject(f"Inductor fuses it with its neighbour {g.describe(neighbour)}", node)
        template = _autotuned_producer(node)
        if template is not None:
            return Reject(f"under max-autotune Inductor may add in the epilogue of {g.describe(template)}", node)
        if _autotunes_well(out):
            return Reject("under max-autotune Inductor's kernel for these static, aligned sizes is as fast", node)
        unavailable = loader.load().why_not(out.device, transpose_add) or _loses(out)
        if unavailable:
            return Reject(unavailable, node)

        factor = -alpha if node.target is aten.sub.Tensor else alpha
        alphas = (float(factor), 0) if floating else (0.0, int(factor))

        def emit(e: Emitter) -> fx.Node:
            return e.call(transpose_add, x, y, *alphas, g.memory_order(out))

        return Match((node,), emit, unproven=_unproven(operands, out))

    def examples(self) -> list[tuple[Callable, tuple]]:
        shapes = [((33, 70), (70, 33)), ((3, 40, 17), (3, 17, 40))]
        return [(lambda x, y: x.mT + y, (torch.randn(a).to(t), torch.randn(b).to(t))) for a, b in shapes for t in DTYPES]


def _runs_across(operand: torch.Tensor, out: torch.Tensor) -> bool | None:
    """Whether ``operand`` is contiguous along another dim than ``out`` and also varies along that of ``out``; None if
    sizes are not known. A small operand that is broadcast along it is read from cache, whatever its order."""
    sizes, strides = g.hints(operand.shape), g.hints(operand.stride())
    out_sizes, out_strides = g.hints(out.shape), g.hints(out.stride())
    if sizes is None or strides is None or out_sizes is None or out_strides is None:
        return None
    missing = len(out_sizes) - len(sizes)
    broadcast = [0] * missing + [0 if s == 1 else t for s, t in zip(sizes, strides)]
    fastest = next((d for d, t in enumerate(broadcast) if t == 1), None)
    along = next((d for d, t in enumerate(out_strides) if t == 1 and out_sizes[d] > 1), None)
    if fastest is None or along is None:
        return False
    return fastest != along and broadcast[along] != 0


# Bytes below which a kernel takes less time than the call that launches it, below which Inductor's may be as fast at symbolic and at
# static sizes; elements below which a CPU's kernel takes less time than the call; elements of rows and columns from which ours was faster
# at static sizes; bytes that a GPU's memory moves at once. (Three draws of 112 static and 67 dynamic planes on an H200: those that these
# rules leave gained 0 to 24 %, and 0.3 % to 2.2 times; none came after the rule on sides below 128.)
_SMALL_CUDA, _SMALL_DYNAMIC, _SMALL_STATIC, _SMALL_CPU, _LARGE_PLANE, _SECTOR = 2 << 20, 12 << 20, 24 << 20, 1 << 15, 2048, 32


def _loses(out: torch.Tensor) -> str | None:
    """Why Inductor's loop is as good on a GPU, by what was measured on an H200; None if it is not."""
    if out.device.type == "cpu":
        return None
    total = math.prod(g.hints(out.shape)) * out.itemsize
    if total < _SMALL_CUDA:
        return f"{total} bytes: a call of an operator costs as much as they do"
    if out.itemsize >= 4 and all(isinstance(s, int) and (s % 32 == 0 or s == 1) for s in out.shape):
        return "static, even sizes of elements of 4 and more bytes: Inductor's tiles are as fast"
    return None


def _unproven(operands: tuple[torch.Tensor, ...], out: torch.Tensor) -> str:
    """Where it is not known that Inductor's loop is slower: random shapes were timed on an H200 and on two CPU cores."""
    sizes = g.hints(out.shape)
    across = next(t for t in operands if _runs_across(t, out))
    if tuple(across.shape) != tuple(out.shape):
        return "a broadcast operand: not measured"
    order, source = ([d for d in g.memory_order(t) if sizes[d] != 1] for t in (out, across))
    beside, along = g.run_length(sizes, source, order), g.run_length(sizes, order, source)
    static = all(isinstance(n, int) for n in (*out.shape, *across.stride()))
    if out.device.type == "cpu":
        return _unproven_on_cpus(math.prod(sizes), out.itemsize, beside, along, static)
    total, short, long = math.prod(sizes) * out.itemsize, min(beside, along), max(beside, along)
    if static:
        if out.itemsize >= 4:
            return "static sizes of elements of 4 and more bytes: Inductor's tiles may be as fast"
        if short < _LARGE_PLANE:
            return "static sizes, rows or columns below 2048: Inductor's tiles are as fast"
        # Rows of the source that begin within sectors: its tiles read a quarter more. Such rows of the result cost our kernel, too.
        large = _SMALL_STATIC if along * out.itemsize % _SECTOR == 0 else 2 * _SMALL_STATIC
        if beside * out.itemsize % _SECTOR == 0 or total < large:
            return "static sizes, few bytes or rows that begin at sectors of memory: Inductor's tiles may be as fast"
        return ""
    if total < (_SMALL_DYNAMIC if out.itemsize < 4 else 2 * _SMALL_DYNAMIC) or short < 64 or long < 256:
        return "dynamic sizes, short rows or few bytes: Inductor's loop may be as fast"
    # There our kernel's boxes take 1.1 to 1.7 times a contiguous add, and Inductor's loop 1.3 to 1.5. (Where other dims lie between the
    # two sides it takes 1.5 to 3.5.)
    plane = math.prod(sizes[d] for d in order[order.index(source[-1]) + 1 :]) == along
    if plane and short < 128:
        return "dynamic sizes, planes with a side below 128: Inductor's loop may be as fast"
    if out.itemsize >= 4 and short >= 128:
        return "dynamic sizes, large planes of 4 and more bytes an element: Inductor's loop is as fast"
    return ""


def _unproven_on_cpus(elements: int, itemsize: int, beside: int, along: int, static: bool) -> str:
    """Inductor turns squares in wider registers than the kernel's, and calls cost less. Where rows of the sum (under symbolic
    sizes: of either side) are short it goes one by one: 1.4x to 6x slower than ours."""
    if elements < _SMALL_CPU:
        return f"{elements} elements on a CPU: a call of an operator costs as much as they do"
    if itemsize == 2 and along <= 4 or not static and itemsize <= 4 and min(beside, along) <= 4:
        return ""
    return "rows are long, or elements are not of 16 bits: Inductor's loop on a CPU may be as fast"


def _autotunes_well(out: torch.Tensor) -> bool:
    """Measured on an H200: with its tile sizes tuned Inductor is within 5 % of the floor on static sizes, unless rows of
    16-bit elements begin at odd ones."""
    from torch._inductor import config

    if not config.max_autotune or out.device.type != "cuda" or not all(isinstance(s, int) for s in out.shape):
        return False
    return all(s * out.itemsize % 4 == 0 for s in out.shape if s > 1)


def _autotuned_producer(node: fx.Node) -> fx.Node | None:
    from torch._inductor import config

    if not (config.max_autotune or config.max_autotune_gemm):
        return None
    return next((p for p in map(g.through_views, node.all_input_nodes) if p.target in _TEMPLATES and len(p.users) == 1), None)
