"""Finds depthwise conv1d along time: Mamba's short convolutions, padded ones of other models, RWKV's with as many taps as samples.

Matched before forward and backward are partitioned (joint level): if only the forward were rewritten, the partitioner would keep and
recompute the pad for the backward. SiLU is absorbed only if its backward is too, or there is none; otherwise the convolution would run
twice. What else follows (channel_epilogue.py) is absorbed where nothing else needs the values in between: in inference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d.activation import read_silu
from fusebackend.patterns.causal_conv1d.channel_epilogue import read_epilogue
from fusebackend.patterns.causal_conv1d.emit import emit_backward, emit_forward
from fusebackend.patterns.causal_conv1d.estimate import backward_workload, forward_workloads
from fusebackend.patterns.causal_conv1d.ops import causal_conv1d, causal_conv1d_backward
from fusebackend.patterns.causal_conv1d.read_backward import Backward, backwards_of, read_backward
from fusebackend.patterns.causal_conv1d.read_forward import Forward, read_forward
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class CausalConv1d(Pattern):
    """The forward, and inference.

    Before and after::

        pad = constant_pad_nd(x, [K-1, 0])
        convolution(pad, w, b, groups=C)                    ->  causal_conv1d(x, w, b, left=K-1, right=0)

        conv = convolution(x, w, b, padding=K-1, groups=C)
        silu(slice(conv, 2, 0, T))                          ->  causal_conv1d(x, w, b, K-1, 0, silu=True)

        conv = convolution(x, w, b, padding=K//2, groups=C)
        norm = (conv - mean) * rsqrt(variance + eps) * scale + shift
        silu(norm)                        ->  causal_conv1d(x, w, b, K//2, K//2, ..., mean, variance, scale, shift, eps, "silu")
    """

    name = "causal_conv1d"
    anchors = (aten.convolution.default,)
    level = "joint"

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read_forward(node)
        if not isinstance(site, Forward):
            return site
        no_kernel = loader.load().why_not(g.value(node).device, causal_conv1d)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")
        return _forward_match(_with_what_follows(site))

    def estimate(self, match: Match) -> Estimate | Sequence[Workload]:
        plain = read_forward(match.site.anchor) if match.site.absorbs else None
        return forward_workloads(match.site, _forward_match(plain) if isinstance(plain, Forward) else None)


class CausalConv1dBackward(Pattern):
    """The backward, with the zeros behind the incoming gradient and the crop of x's.

    Before and after::

        gradients = convolution_backward(g, constant_pad_nd(x, [K-1, 0]), w)
        dx = constant_pad_nd(gradients[0], [-(K-1), 0])     ->  dx, dw, db = causal_conv1d_backward(g, x, w, b, K-1)
    """

    name = "causal_conv1d_backward"
    anchors = (aten.convolution_backward.default,)
    level = "joint"
    priority = 1  # decided before the forward, which absorbs SiLU only if no backward is left that needs the value before it

    def match(self, node: fx.Node) -> Match | Reject | None:
        site = read_backward(node)
        if not isinstance(site, Backward):
            return site
        no_kernel = loader.load().why_not(g.value(site.grad).device, causal_conv1d_backward)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")
        outputs = tuple(r for r in site.results if r is not None)
        if not outputs:
            return None
        note = "absorbs SiLU" if site.silu else ""
        return Match(outputs, lambda e: emit_backward(e, site), _interior(site.nodes, outputs), note, site=site)

    def estimate(self, match: Match) -> Estimate | Workload:
        return backward_workload(match.site)


def _forward_match(site: Forward) -> Match:
    after = "SiLU" if site.silu else site.after.absorbed if site.after is not None else ""
    absorbed = [what for what, there in ((after, after), ("constant", site.shift != 0)) if there]
    note = f"absorbs {' and '.join(absorbed)}" if absorbed else ""
    outputs = (site.output,)
    return Match(outputs, lambda e: emit_forward(e, site), _interior(site.nodes, outputs), note, site=site)


def _with_what_follows(site: Forward) -> Forward:
    """``site`` with all that may be computed with it: SiLU, in training too, or what batch norm in inference and another activation are."""
    after = read_epilogue(site.pre) if not site.transposed else None
    if after is not None and after.nodes and (after.is_affine or after.activation != "silu"):
        return site.with_epilogue(after)
    silu = read_silu(site.pre)
    return site.with_silu(*silu) if silu is not None and _is_only_for_silu(site, silu[1]) else site


def _is_only_for_silu(site: Forward, silu: tuple[fx.Node, ...]) -> bool:
    """Whether nothing needs the value before SiLU but SiLU itself, and backwards that recompute it."""
    inside = set(silu)
    for backward in backwards_of(site):
        if isinstance(backward, Backward) and backward.silu:
            inside.update(backward.nodes)
    return all(u in inside for u in site.pre.users)


def _interior(nodes: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Of ``nodes``, those that only the outputs and each other use."""
    inside = set(outputs)
    for node in sorted(set(nodes) - inside, reverse=True):
        if all(u in inside for u in node.users):
            inside.add(node)
    return tuple(sorted(inside - set(outputs)))
