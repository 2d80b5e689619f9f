"""permute -> add: finds ``x.transpose(...) + alpha * y``, which the kernels compute in one pass that reads and writes whole cache lines.

The operator is looked for by memory order, not by spelling: an ``add`` (or ``sub``) with an operand of full size that runs along
another dim than its result. The view itself stays in the graph, where it costs nothing.

    permute: f32[8, 512, 256] = aten.permute(x, [0, 2, 1])         permute = aten.permute(x, [0, 2, 1])
    add:     f32[8, 512, 256] = aten.add(permute, y, alpha=2)  ->  add = fusebackend.transpose_add(permute, y, 2.0, 0, [0, 2, 1])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import arguments, loader
from fusebackend.patterns.transpose_add.estimate import workload
from fusebackend.patterns.transpose_add.ops import DTYPES, transpose_add
from fusebackend.patterns.transpose_add.sites import Sum, is_transposed
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


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
        transposed = [is_transposed(t, out) for t in operands]
        permuted = next((n for n in (x, y) if n.target is aten.permute.default), None)
        if permuted is None and True not in transposed:
            return None

        dtypes = [t.dtype for t in operands]
        if dtypes[0] != dtypes[1] or out.dtype != dtypes[0]:
            return Reject(f"mixed dtypes: {dtypes[0]} and {dtypes[1]} give {out.dtype}; one dtype is accepted", node)
        if out.dtype not in DTYPES:
            return Reject(f"dtype {out.dtype} is not supported", node)
        if None in transposed or g.memory_order(out) is None:
            return Reject("sizes are not known before run time (unbacked symbols)", node)
        if True not in transposed:
            return Reject("the operands run along the same dim in memory: nothing is transposed", permuted)
        if out.dim() > arguments.tile_max_rank():
            return Reject(f"{out.dim()} dimensions; up to {arguments.tile_max_rank()} are accepted", node)
        if len({t.device for t in operands}) > 1:
            return Reject(f"operands on different devices: {operands[0].device} and {operands[1].device}", node)
        if isinstance(alpha, fx.Node):
            return Reject("alpha is computed in the graph; a number is accepted", node)
        floating = out.dtype.is_floating_point
        if isinstance(alpha, complex) or (isinstance(alpha, float) and not floating) or (floating and abs(alpha) > 2**53):
            return Reject(f"alpha={alpha!r} is not accepted for {out.dtype}", node)
        limits = torch.finfo(out.dtype) if floating else None
        if limits and out.device.type == "cpu" and alpha and not limits.tiny <= abs(alpha) <= limits.max:
            # PyTorch's loops of 16-bit floats round alpha first: times infinity that is not what the number gives. An overflow is an error.
            return Reject(f"alpha={alpha!r} vanishes or overflows in {out.dtype}", node)
        unavailable = loader.load().why_not(out.device, transpose_add)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")

        factor = -alpha if node.target is aten.sub.Tensor else alpha
        alphas = (float(factor), 0) if floating else (0.0, int(factor))

        def emit(e: Emitter) -> fx.Node:
            return e.call(transpose_add, x, y, *alphas, g.memory_order(out))

        return Match((node,), emit, site=Sum(node, out, operands))

    def estimate(self, match: Match) -> Estimate | Workload:
        if 0 in match.site.out.shape:
            return Estimate(False, "an empty tensor: nothing to gain")
        return workload(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        shapes = [((33, 70), (70, 33)), ((3, 40, 17), (3, 17, 40))]
        return [(lambda x, y: x.mT + y, (torch.randn(a).to(t), torch.randn(b).to(t))) for a, b in shapes for t in DTYPES]
