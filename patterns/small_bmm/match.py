"""Products of many small matrices, as memory delivers them.

    bmm: f32[100000, 16, 16] = aten.bmm(a, b)  ->  small_bmm = fusebackend.small_bmm(a, b)

Libraries are made for large matrices: of 16 x 16 numbers they use a part of each tile. Here a block of threads reads several products at
once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.small_bmm.estimate import workload
from fusebackend.patterns.small_bmm.ops import DTYPES, is_transposed, most_size, small_bmm
from fusebackend.patterns.small_bmm.sites import Site
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class SmallBmm(Pattern):
    """``aten.bmm`` of small matrices -> ``small_bmm``."""

    name = "small_bmm"
    anchors = (aten.bmm.default,)
    priority = 1  # before fp32_matmul, whose tiles are larger

    def match(self, node: fx.Node) -> Match | Reject | None:
        a, b = node.args[:2]
        if len(node.args) > 2 or node.kwargs or not g.is_tensor(a) or not g.is_tensor(b):
            return None
        x, y = g.value(a), g.value(b)
        sizes = g.hints((x.shape[1], y.shape[2], x.shape[2]))
        if sizes is None or max(sizes) > most_size():
            return None
        if 0 in sizes:
            return Reject("matrices without elements", node)
        if x.dtype not in DTYPES or g.value(node).dtype != x.dtype:
            return Reject(f"products of {x.dtype} in {g.value(node).dtype} are not computed here", node)
        if x.dtype == torch.float32 and not _asks_for_fp32(x.device):
            return Reject("the precision of fp32 matrix products is set to less than fp32: a library may be faster", node)
        transposed = [is_transposed(t.shape, t.stride(), g.same_size) for t in (x, y)]
        if None in transposed:
            return Reject("the matrices of an operand do not follow one another without a gap, by rows or by columns", node)
        unavailable = loader.load().why_not(x.device, small_bmm)
        if unavailable:
            return Reject(unavailable, node, "no_kernel")

        def emit(emitter: Emitter) -> fx.Node:
            return emitter.call(small_bmm, a, b)

        return Match((node,), emit, site=Site(node, (x, y), (bool(transposed[0]), bool(transposed[1]))))

    def estimate(self, match: Match) -> Estimate | Workload:
        sizes = g.hints(match.site.operands[0].shape)
        if sizes is None:
            return Estimate(None, "a size depends on data, so it is not known whether the products pay", "unmeasured")
        return Estimate(False, "no products") if sizes[0] == 0 else workload(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def plain(a, b):
            return a @ b

        def left(a, b):
            return a.mT @ b

        def right(a, b):
            return a @ b.mT

        shapes = [((70, 16, 16), (70, 16, 16)), ((33, 5, 5), (33, 5, 5))]
        return [(fn, tuple(torch.randn(s).to(t) for s in pair)) for fn in (plain, left, right) for pair in shapes for t in DTYPES]


def _asks_for_fp32(device: torch.device) -> bool:
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
