"""Finds long convolutions that are written by FFT, as S4, Hyena and their kin write them, and their gradients.

    irfft(rfft(u, n=2 * L) * rfft(k, n=2 * L), n=2 * L)[..., :L]

The sites that share a transform, those of a forward or those of a backward, are replaced together: none of them would save a transform by
itself. The backward is decided first. If it is left as it is, the forward's transforms are computed for it, and count against the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.patterns.causal_conv1d.accuracy import why_inaccurate
from fusebackend.patterns.causal_conv1d.emit_fft import emit_fft
from fusebackend.patterns.causal_conv1d.estimate_fft import fft_workload
from fusebackend.patterns.causal_conv1d.fft_calls import all_calls, roles_of
from fusebackend.patterns.causal_conv1d.ops import causal_conv1d, causal_conv1d_backward
from fusebackend.patterns.causal_conv1d.read_fft import Group, Site, read_group
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class _FftConvolution(Pattern):
    anchors = (aten._fft_c2r.default, aten._fft_c2c.default)
    level = "joint"
    is_backward = False

    def match(self, node: fx.Node) -> Match | Reject | None:
        if node.target is aten._fft_c2c.default and node.args[3]:
            return None  # a transform
        if g.needs_gradients(node) != self.is_backward:
            return None
        group = read_group(node)
        if not isinstance(group, Group):
            return group
        sites = [s for s in group.sites if s.is_backward == self.is_backward]
        if not sites or node is not sites[0].output.inverse:
            return None  # decided at the first of them
        device = g.value(node).device
        no_kernel = loader.load().why_not(device, causal_conv1d, causal_conv1d_backward)
        if no_kernel:
            return Reject(no_kernel, node, "no_kernel")
        calls = all_calls(sites, roles_of(group))
        if isinstance(calls, Reject):
            return calls
        for site, made in calls:
            inaccurate = next(filter(None, map(why_inaccurate, made)), "")
            if inaccurate:
                return Reject(inaccurate, site.output.inverse)
        outputs = tuple(site.output.node for site, _ in calls)
        interior = _only_used_by(_before(sites), outputs)
        note = f"{len(sites)} that share transforms" if len(sites) > 1 else ""
        made = [call for _, made in calls for call in made]
        return Match(outputs, lambda e: emit_fft(e, calls), interior, note, site=made)

    def estimate(self, match: Match) -> Estimate | Workload:
        return fft_workload(match.site, match.nodes, self.is_backward)


class FftConvolution(_FftConvolution):
    """The forward, and inference.

    Before and after::

        irfft(rfft(u, n) * rfft(k, n), n)[..., :L]          ->  causal_conv1d_backward(u, u, k, left=0)[0]
    """

    name = "fft_conv1d"


class FftConvolutionBackward(_FftConvolution):
    """The gradients.

    Before and after::

        irfft(rfft(g, n) * conj(rfft(k, n)), n)[..., :L]    ->  causal_conv1d(g, k, left=0, right=K - 1)
        irfft(sum(rfft(g, n) * conj(rfft(u, n))))[..., :K]  ->  causal_conv1d_backward(u, g, k, left=0)[1]
    """

    name = "fft_conv1d_backward"
    is_backward = True
    priority = 1


def _before(sites: Sequence[Site]) -> tuple[fx.Node, ...]:
    """The nodes from the rows to the outputs, without either."""
    rows = {f.rows.node for s in sites for p in s.products for f in (p.x, p.k)}
    outputs = {s.output.node for s in sites}
    found, stack = set[fx.Node](), [n for s in sites for n in s.output.nodes]
    while stack:
        node = stack.pop()
        if node in found or node in rows or node.op != "call_function" or not g.is_tensor(node):
            continue
        found.add(node)
        found.update(u for u in node.users if u.target is aten.sym_size.int and node not in outputs)
        stack += node.all_input_nodes
    return tuple(sorted(found - outputs))


def _only_used_by(nodes: Sequence[fx.Node], outputs: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Of ``nodes``, those that only the outputs and each other use."""
    inside = set(outputs)
    for node in sorted(set(nodes), reverse=True):
        if all(u in inside for u in node.users):
            inside.add(node)
    return tuple(sorted(inside - set(outputs)))
