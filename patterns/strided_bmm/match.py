"""Products of many matrices by kernels that read operands where they lie, in place of copies into the order that a library reads.

As ``einsum("bclhn,bcshn->bclsh", c, b)`` writes them, where heads stand between rows and columns:

    permute: f32[4, 16, 24, 64, 128] = aten.permute(c, [0, 1, 3, 2, 4])       permute = aten.permute(c, [0, 1, 3, 2, 4])
    clone:   f32[4, 16, 24, 64, 128] = aten.clone(permute)                    view = aten.view(permute, [64, 24, 64, 128])
    view:    f32[1536, 64, 128]      = aten.view(clone, [1536, 64, 128])  ->  ...
    ...                                                                       strided_bmm = fusebackend.strided_bmm(view, view_1, ...)
    bmm:     f32[1536, 64, 64]       = aten.bmm(view, view_1)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.strided_bmm.estimate import estimate
from fusebackend.patterns.strided_bmm.ops import DTYPES, MOST_FP32_TERMS, unavailable
from fusebackend.patterns.strided_bmm.sites import Site, is_copied, read
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class StridedBmm(Pattern):
    """``aten.bmm`` of copies -> ``strided_bmm`` of what was copied."""

    name = "strided_bmm"
    anchors = (aten.bmm.default,)
    priority = 2  # before those that copy faster, or multiply copies
    devices = ("cuda",)

    def match(self, node: fx.Node) -> Match | Reject | None:
        a, b = node.args[:2]
        if len(node.args) > 2 or node.kwargs or not g.is_tensor(a) or not g.is_tensor(b):
            return None
        value = g.value(node)
        if value.device.type != "cuda" or any(g.value(x).dtype != value.dtype for x in (a, b)) or not (is_copied(a) or is_copied(b)):
            return None
        if value.dtype not in DTYPES:
            return Reject(f"dtype {value.dtype}; bf16, fp16 and fp32 are accepted", node)
        if not all(isinstance(n, int) for x in (node, a, b) for n in (*g.value(x).shape, *g.value(x).stride())):
            return Reject("symbolic sizes: how the kernels compute a product is chosen for those that are known", node)
        site = read(node)
        if not isinstance(site, Site):
            return site
        if value.dtype == torch.float32:
            if torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee"):
                return Reject("the precision of fp32 matrix products is set to less than fp32: a library may be faster", node)
            terms = g.value(a).shape[2]
            if terms > MOST_FP32_TERMS:
                return Reject(f"{terms} terms in fp32: up to {MOST_FP32_TERMS} are added well in this order", node)
        reason = unavailable(value.device)
        if reason:
            return Reject(reason, node, "no_kernel")
        note = f"{len(site.copies)} of the operands are read where they lie"
        return Match((node,), site.emit, site.interior, note=note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match.site)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def scores(c, b):
            return torch.einsum("clhn,cshn->clsh", c, b)

        def states(b, x):
            return torch.einsum("clhn,clhp->chpn", b, x)

        pairs = [(torch.randn(2, 24, 8, 16), torch.randn(2, 24, 8, 16))]
        return [(fn, tuple(t.to(dtype) for t in pair)) for fn in (scores, states) for pair in pairs for dtype in sorted(DTYPES, key=str)]
