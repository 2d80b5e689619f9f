"""What attention makes a device do: our kernels, and the products, the softmax and the sums that it is written out as."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.facts import Terms
from fusebackend.patterns.attention.work import Attended, work
from fusebackend.rewriting.library_product import called_product
from fusebackend.rewriting.pattern import Estimate, Generated, Work, Workload

_aten = torch.ops.aten
#: Of sites with gathered terms: their loops jump about in memory as those of others do not.
_GATHERING = "attention"
_PRODUCTS = (_aten.bmm.default, _aten.mm.default, _aten.baddbmm.default, _aten.addmm.default)


def workload(
    site: Attended, passes: Sequence[Work], backward: bool, nodes: Sequence[fx.Node], terms: Terms | None = None
) -> Estimate | Workload:
    """The work of an attention both ways.

    Args:
        passes: what is moved around our kernels.
        backward: whether the graph holds the gradients too.
        nodes: all nodes that the replacement computes or makes unnecessary.
        terms: of the scores, that are computed for them alone.
    """
    if site.device.type != "cuda":
        return Estimate(None, "the CPU's kernels are portable ones, of which no time is known", "unmeasured")
    products = [n for n in nodes if n.target in _PRODUCTS]
    works = [_product(n, site.dynamic) for n in products]
    if None in works:
        return Estimate(None, "a size depends on data, so it is not known whether the kernels pay", "unmeasured")
    ours: list[Work | Generated] = [work(site, False), *([work(site, True)] if backward else []), *(_masks(site) if site.drops else [])]
    theirs: list[Work | Generated] = [w for w in works if w is not None]
    ours += passes
    if terms is not None:
        ours.append(_asked(terms.stored, terms))
    return Workload(tuple(ours), (*theirs, *_generated([n for n in nodes if n.target not in _PRODUCTS], terms)))


def _generated(nodes: Sequence[fx.Node], terms: Terms | None) -> list[Generated]:
    """What Inductor generates. Forward and backward are graphs of their own: nothing of one is fused with the other."""
    backward = set[fx.Node]()
    for node in sorted(nodes, reverse=True):
        if g.needs_gradients(node) or (node.users and all(u in backward for u in node.users)):
            backward.add(node)
    forward = _asked((*(terms.nodes if terms is not None else ()), *(n for n in nodes if n not in backward)), terms)
    return [part for part in (forward, _asked(sorted(backward), None)) if part.nodes]


def _asked(nodes: Sequence[fx.Node], terms: Terms | None) -> Generated:
    """``nodes`` without the views behind them, each of which would be stored."""
    kept = set(nodes)
    for node in sorted(nodes, reverse=True):
        if g.is_view(node) and not any(u in kept for u in node.users):
            kept.remove(node)
    gathers = terms is not None and terms.gather
    return Generated(tuple(sorted(kept)), family=_GATHERING if gathers else "", is_unlike_others=gathers)


def _masks(site: Attended) -> list[Work]:
    """Of dropout, what is not the softmax's any more: the kernel that draws the mask writes it, and its bits are made of it."""
    moved = float(site.scores), site.scores * (1 + 1 / 8)
    return [Work("stream", {"bytes": byte_count}, {"log2 itemsize": 0.0}) for byte_count in moved]


def _product(product: fx.Node, dynamic: bool) -> Work | None:
    left, right = (g.value(n) for n in product.args[-2:] if isinstance(n, fx.Node))
    return called_product(left, right, dynamic)
