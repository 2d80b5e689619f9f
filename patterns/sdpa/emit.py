"""Builds the replacement: a call of PyTorch's operator, with the views and copies that they need."""

from __future__ import annotations

from torch import fx

from fusebackend.patterns.attention.emit import Site, operand, placed, times_gain
from fusebackend.patterns.sdpa.masks import Known, emit_mask
from fusebackend.patterns.sdpa.ops import sdpa
from fusebackend.rewriting.pattern import Emitter


def emit(e: Emitter, site: Site, known: Known) -> list[fx.Node]:
    """The values of ``site.outputs``."""
    forward = site.forward
    query = times_gain(e, site, operand(e, site, site.queries, (forward.rows, forward.depth)))
    key = operand(e, site, site.keys, (forward.columns, forward.depth))
    value = operand(e, site, site.values, (forward.columns, forward.width))
    mask = None if known.nothing or known.causal else emit_mask(e, site)
    out = e.call(sdpa, query, key, value, mask, site.scale, known.causal, known.sees_all_rows or forward.softmax.is_safe)
    return [placed(e, site, forward.out, out)]
