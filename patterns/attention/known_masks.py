"""Masks that a graph computes of nothing but sizes, as causal ones are: they are computed while compiling, however they are written."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import steps
from fusebackend.patterns.attention.biases import Hiding, hiding_of, may_hide
from fusebackend.patterns.attention.dims import Dim, product
from fusebackend.patterns.attention.emit import Site
from fusebackend.patterns.attention.known_values import Computer
from fusebackend.patterns.attention.numbers import is_purely_learned

_NOTE = "fusebackend_causal"


def without_causal_masks(site: Site) -> Site:
    """The site as causal attention, without the masks that say so; the same where none does."""
    rows, columns = site.scores_layout[-2:]
    if not g.same_size(product(a.size for a in rows), product(a.size for a in columns)):
        return site
    causal = [i for i in range(len(site.addends)) if _is_causal(site, i)]
    if not causal:
        return site
    kept = [i for i in range(len(site.addends)) if i not in causal]
    addends = tuple(site.addends[i] for i in kept)
    return dataclasses.replace(site, addends=addends, slots=tuple(map(kept.index, site.slots)), causal=True)


def _is_causal(site: Site, number: int) -> bool:
    """Whether an addend hides from each query the keys behind it, and does nothing else. Where it hides by a finite number, nothing else
    may hide: all keys of a row that both hide wholly have equal weights."""
    hiding = hiding_of(site.addends[number])
    if hiding is None or number in site.slots:
        return False
    others = [(i, term) for i, a in enumerate(site.addends) if i != number for term in a.terms]
    if not math.isinf(hiding.number) and any(may_hide(t) and not (i in site.slots and is_purely_learned(t.node)) for i, t in others):
        return False
    made = steps(g.value(hiding.condition), hiding.dims, site.scores_layout, repeat=False)
    known = hiding.condition.meta.setdefault(_NOTE, {})  # a mask is most often that of all layers
    key = f"{hiding.hides} {made}"
    if key not in known:
        known[key] = _hides_what_is_behind(hiding, site.scores_layout)
    return known[key]


def _hides_what_is_behind(hiding: Hiding, layout: tuple[Dim, ...]) -> bool:
    with _disable_current_modes():  # a graph may be rewritten under a fake tensor mode
        value = Computer().value(hiding.condition)
        if value is None:
            return False
        found = arranged(hiding.condition, value, hiding.dims, layout)
        queries, keys = found.shape[-2:]
        behind = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        return queries == keys > 1 and bool((found == (behind if hiding.hides else ~behind)).all())


def arranged(node: fx.Node, value: torch.Tensor, dims: tuple[Dim, ...], layout: tuple[Dim, ...]) -> torch.Tensor:
    for target, given in steps(g.value(node), dims, layout, repeat=False):
        value = target(value, *given)
    return value
