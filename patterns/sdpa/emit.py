"""Builds the replacement: calls of PyTorch's operators, with the views and copies that they need."""

from __future__ import annotations

import operator

from torch import fx

from fusebackend.patterns.attention.emit import Site, operand, placed
from fusebackend.patterns.sdpa.masks import Known, emit_mask
from fusebackend.patterns.sdpa.ops import sdpa, sdpa_backward
from fusebackend.rewriting.pattern import Emitter


def emit(e: Emitter, site: Site, known: Known) -> list[fx.Node]:
    """The values of ``site.outputs``."""
    forward, backward = site.forward, site.backward
    query = operand(e, site, site.queries, (forward.rows, forward.depth))
    key = operand(e, site, site.keys, (forward.columns, forward.depth))
    value = operand(e, site, site.values, (forward.columns, forward.width))
    mask = None if known.nothing or known.causal else emit_mask(e, site)
    settings = site.scale, known.causal, known.sees_all_rows or forward.softmax.is_safe
    made = e.call(sdpa, query, key, value, mask, *settings)
    out, logsumexp = e.call(operator.getitem, made, 0), e.call(operator.getitem, made, 1)
    found = [placed(e, site, forward.out, out)]
    if backward is None:
        return found
    assert site.grad is not None
    grad = operand(e, site, site.grad, (forward.rows, forward.width))
    gradients = e.call(sdpa_backward, grad, query, key, value, mask, out, logsumexp, *settings)
    for i, result in enumerate((backward.queries, backward.keys, backward.values)):
        if result is not None:
            found.append(placed(e, site, result, e.call(operator.getitem, gradients, i)))
    return found
