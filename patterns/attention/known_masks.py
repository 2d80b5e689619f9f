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
from fusebackend.patterns.attention.numbers import uniform

aten, prims = torch.ops.aten, torch.ops.prims

#: The largest tensor, in bytes, and the most nodes, that are computed while compiling.
_MOST_BYTES, _MOST_NODES = 2**26, 200
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
    others = [term for i, a in enumerate(site.addends) if i != number and i not in site.slots for term in a.terms]
    if not math.isinf(hiding.number) and any(map(may_hide, others)):
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


class Computer:
    """Computes nodes that depend on no input."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, torch.Tensor] = {}

    def value(self, last: fx.Node) -> torch.Tensor | None:
        order, stack = list[fx.Node](), [last]
        while stack:
            node = stack.pop()
            number = uniform(node) if node.target is aten.lift_fresh_copy.default else None  # a tensor that the program made of a number
            if number is not None:
                self.values[node] = torch.full((), number, dtype=g.value(node).dtype).expand(g.value(node).shape)
                continue
            if not _is_computable(node) or len(order) > _MOST_NODES:
                return None
            order.append(node)
            stack += node.all_input_nodes
        for node in sorted(set(order)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
            device = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
            try:
                self.values[node] = node.target(*args, **{**kwargs, **device})  # type: ignore[operator]
            except Exception:
                return None
        return self.values[last]


def _is_computable(node: fx.Node) -> bool:
    """Whether ``node`` is a small tensor of known sizes that an operator without effects and without chance computes."""
    if not g.may_be_called_early(node):
        return False
    value, symbolic = g.value(node), list[object]()
    fx.node.map_aggregate((node.args, node.kwargs), lambda a: symbolic.append(a) if isinstance(a, torch.SymInt) else None)
    sizes = [s for s in (*value.shape, *value.stride()) if not isinstance(s, int)]
    return not sizes and not symbolic and value.numel() * value.itemsize <= _MOST_BYTES
