"""Gives attention that is written out to PyTorch's own attention on CPUs, where no gradients are computed.

mul    = aten.mul(q, 0.25)
bmm    = aten.bmm(mul, permute(k))                        out = fusebackend.sdpa(q, k, v, None, 0.25, False, True)
exp    = aten.exp(bmm - amax(bmm))                    ->
div    = aten.div(exp, sum(exp))
bmm_1  = aten.bmm(div, v)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.emit import Site
from fusebackend.patterns.attention.match import Attention, describe_biases, read_interior, read_site
from fusebackend.patterns.sdpa.emit import emit
from fusebackend.patterns.sdpa.estimate import estimate
from fusebackend.patterns.sdpa.masks import read_mask
from fusebackend.patterns.sdpa.ops import DTYPES
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

#: Of fewer, the error of PyTorch's exponential shows in fp32: with 16 keys, results have 1.1 times eager mode's.
LEAST_KEYS_IN_FP32 = 128


class Sdpa(Pattern):
    """Attention that is written out, without gradients -> PyTorch's own attention, on CPUs."""

    name = "sdpa"
    anchors = Attention.anchors
    level = "joint"
    priority = 1  # beside the family attention, whose kernels for CPUs are portable ones

    def match(self, node: fx.Node) -> Match | Reject | None:
        if g.value(node).device.type != "cpu":
            return None
        site = read_site(node, DTYPES, most_batch_dims=2)
        if not isinstance(site, Site):
            return site
        if site.forward.dropout is not None:
            return Reject(
                "dropout of the probabilities: PyTorch's attention would draw other random numbers", site.forward.dropout.mask, "illegal"
            )
        if not g.same_size(_size(site, "depth"), _size(site, "width")):
            return Reject("PyTorch's attention takes queries and values of one size", node)
        if site.backward is not None:
            return Reject("the gradients of PyTorch's attention have larger errors than those of what is written", node)
        if site.forward.dtype == torch.float32 and (_keys(site) or 0) < LEAST_KEYS_IN_FP32:
            return Reject(f"in float32 and with fewer than {LEAST_KEYS_IN_FP32} keys PyTorch's attention has larger errors", node)
        known = read_mask(site)

        def build(emitter: Emitter) -> Sequence[fx.Node]:
            return emit(emitter, site, known)

        interior = read_interior(site)
        note = "causal" if known.causal else "without a mask" if known.nothing else describe_biases(site)
        return interior if isinstance(interior, Reject) else Match(site.outputs, build, interior, note, site=(site, known))

    def estimate(self, match: Match) -> Estimate | Workload:
        return estimate(match)

    def examples(self) -> list[tuple[Callable, tuple]]:
        def plain(q, k, v):
            return (q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v

        def causal(q, k, v):
            hidden = torch.ones(128, 128, dtype=torch.bool, device=q.device).triu(1)
            return (q @ k.transpose(-1, -2) * 0.25).masked_fill(hidden, float("-inf")).softmax(-1) @ v

        def masked(q, k, v, mask):
            return (((q * 0.25) @ k.transpose(-1, -2)) + mask).softmax(-1) @ v

        found: list[tuple[Callable, tuple]] = []
        operands = tuple(torch.randn(2, 3, 128, 16) for _ in range(3))
        found += [(plain, operands), (causal, operands), (masked, (*operands, torch.randn(2, 1, 1, 128)))]
        return found


def _keys(site: Site) -> int | None:
    sizes = g.hints([axis.size for axis in site.forward.columns])
    return None if sizes is None else math.prod(sizes)


def _size(site: Site, which: str):
    size = 1
    for axis in getattr(site.forward, which):
        size = size * axis.size
    return size
