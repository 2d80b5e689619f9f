"""permute -> contiguous: copies into another memory order.

Whatever made them: attention heads, NCHW <-> NHWC, window partition, channel shuffle, a reshape that copies, an operand of ``bmm`` or of
a 1-D convolution that is brought into order first.

    permute: f32[8, 256, 512] = aten.permute(x, [0, 2, 1])         permute = aten.permute(x, [0, 2, 1])
    clone:   f32[8, 256, 512] = aten.clone(permute)            ->  clone = fusebackend.permute_copy(permute, [0, 1, 2])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.native import arguments, loader
from fusebackend.patterns.permute.estimate import workload
from fusebackend.patterns.permute.ops import permute_copy
from fusebackend.patterns.permute.sites import Copy, copies
from fusebackend.rewriting.pattern import Emitter, Estimate, Match, Pattern, Reject, Workload

aten = torch.ops.aten


class Permute(Pattern):
    """Matches ``aten.clone`` that changes the memory order (a reshape that copies is one too), and operands that their consumer copies."""

    name = "permute"
    priority = -1  # patterns that replace a computation go first
    anchors = (aten.clone.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)

    def match(self, node: fx.Node) -> Match | Reject | None:
        answers = [_check(copy) for copy in copies(node)]
        legal = [a for a in answers if isinstance(a, Copy)]
        if not legal:
            return next((a for a in answers if a is not None), None)
        return _match(node, legal)

    def estimate(self, match: Match) -> Estimate | Sequence[Workload]:
        """Of all copies, and of each by itself: of several operands, some may pay and others not."""
        made: tuple[Copy, ...] = match.site
        if any(copy.reordering is not None and copy.reordering.bytes == 0 for copy in made):
            return Estimate(False, "an empty tensor: nothing to gain")
        single = [workload([copy], _match(match.outputs[0], [copy])) for copy in made] if len(made) > 1 else []
        return [workload(made), *single]

    def examples(self) -> list[tuple[Callable, tuple]]:
        def transposed(x):
            return x.transpose(1, 2).contiguous()

        def shuffled(x):
            return x.view(x.shape[0], 4, -1, x.shape[2]).transpose(1, 2).reshape(x.shape)

        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
        x = torch.randn(5, 260, 259) * 50
        return [(f, (x.to(t),)) for f in (transposed, shuffled) for t in dtypes]


def _match(node: fx.Node, made: Sequence[Copy]) -> Match:
    """``node``, with these copies made by the kernel."""

    def emit(e: Emitter) -> fx.Node:
        results = {c.argument: _made_before(node, c) or e.call(permute_copy, c.source, c.order) for c in made}
        if None in results:
            return results[None]
        return e.call(node.target, *(results.get(i, a) for i, a in enumerate(node.args)), **node.kwargs)

    return Match((node,), emit, site=tuple(made))


def _made_before(node: fx.Node, copy: Copy) -> fx.Node | None:
    """The same copy, made for another node, that ``node`` may read: einsum's gradient is an operand of two products."""
    if copy.argument is None:  # a tensor of its own, which may be an output of the graph
        return None
    made = node.graph.find_nodes(op="call_function", target=permute_copy, sort=False)
    return next((n for n in made if _is_same(n, copy) and n < node and g.mutation_between(n, node) is None), None)


def _is_same(node: fx.Node, copy: Copy) -> bool:
    (source, order), copied = node.args, g.value(copy.source)
    return order == copy.order and g.share_storage(g.value(source), copied) and g.difference(g.value(source), copied) is None


def _check(copy: Copy) -> Copy | Reject | None:
    """The copy if ``permute_copy`` may make it, why not, or None if it does not change the memory order."""
    x, node, reordering = g.value(copy.source), copy.node, copy.reordering
    if reordering is None:
        return Reject("sizes are not known before run time (unbacked symbols)", node)
    if reordering.source_order == reordering.result_order or 0 in reordering.strides:  # an expanded tensor is read from cache
        return None
    if x.is_conj() or x.is_neg() or x.layout is not torch.strided:
        return Reject(
            "the source is lazily conjugated or negated, or not strided; only plain tensors are copied bit by bit", node, "illegal"
        )
    unavailable = loader.load().why_not(copy.device, permute_copy)
    if unavailable:
        return Reject(unavailable, node, "no_kernel")
    if x.dim() > arguments.tile_max_rank():
        return Reject(f"{x.dim()} dimensions; up to {arguments.tile_max_rank()} are accepted", node)
    return copy
