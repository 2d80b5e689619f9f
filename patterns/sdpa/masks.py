"""What is added to the scores, as PyTorch's kernels take it: one mask. And what is known of it before run time.

A mask that is computed from sizes alone, as causal ones are, is computed here: whether it is causal, and whether it hides a row wholly,
does not depend on how it is written.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend.patterns.attention.arrange import converted
from fusebackend.patterns.attention.biases import ABSORBS, emit_addend, fill_of
from fusebackend.patterns.attention.emit import Site
from fusebackend.patterns.attention.known_masks import arranged
from fusebackend.patterns.attention.known_values import Computer
from fusebackend.patterns.attention.scores import Bias
from fusebackend.patterns.sdpa.ops import LEAST
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of all that is added to the scores.

    Attributes:
        nothing: it is 0 everywhere.
        causal: it hides from each query the keys behind it, and nothing else; there are as many keys as queries. False where scores have a
            negative scale, for which PyTorch's causal kernel for CPUs gives NaN.
        sees_all_rows: each query sees a key.
    """

    nothing: bool = False
    causal: bool = False
    sees_all_rows: bool = False


def read_mask(site: Site) -> Known:
    if not site.addends:
        return Known(nothing=True, sees_all_rows=True)
    with _disable_current_modes():  # a graph may be rewritten under a fake tensor mode
        total = _computed(site)
        if total is None:
            return Known()
        return Known(not total.any(), site.scale > 0 and _is_causal(total), bool((total.amax(-1) >= LEAST).all()))


def _is_causal(total: torch.Tensor) -> bool:
    queries, keys = total.shape[-2:]
    if queries != keys or queries == 1:
        return False
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return bool(((total < ABSORBS) == hidden).all()) and not total.tril().any()


def _computed(site: Site) -> torch.Tensor | None:
    """The sum of all addends, if it depends on nothing but sizes."""
    total = torch.zeros(1, 1, 1, 1)
    for addend in site.addends:
        value = torch.zeros(1, 1, 1, 1)
        for term in addend.terms:
            node, dims = addend.source_of(term)
            found = Computer().value(node)
            if found is None:
                return None
            found = arranged(node, found, dims, site.scores_layout)
            if isinstance(term, Bias):
                value = value + found.float() * term.factor
            else:
                value = torch.where(found == term.hides, fill_of(term), value)
        total = total + value
    return None if total.isnan().any() else total


def emit_mask(e: Emitter, site: Site) -> fx.Node:
    """The sum of all addends, of four dims."""
    dtype = site.forward.dtype
    found = [emit_addend(e, addend, site.scores_layout, dtype) for addend in site.addends]
    mask = found[0]
    for other in found[1:]:
        mask = e.call(aten.add.Tensor, converted(e, mask, torch.float32), converted(e, other, torch.float32))
    return mask
