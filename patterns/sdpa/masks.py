"""What is added to the scores, as PyTorch's kernels take it: one mask. And what is known of it before run time.

A mask that is computed from sizes alone, as causal ones are, is computed here: whether it is causal, and whether it hides a row wholly,
does not depend on how it is written.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.arrange import converted, steps
from fusebackend.patterns.attention.biases import ABSORBS, emit_addend, fill_of
from fusebackend.patterns.attention.dims import Dim
from fusebackend.patterns.attention.emit import Site
from fusebackend.patterns.attention.numbers import uniform
from fusebackend.patterns.attention.scores import Bias
from fusebackend.patterns.sdpa.ops import LEAST
from fusebackend.rewriting.pattern import Emitter

aten, prims = torch.ops.aten, torch.ops.prims

#: The largest tensor, in elements, and the most nodes, that are computed while compiling.
_MOST_ELEMENTS, _MOST_NODES = 2**22, 200


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of all that is added to the scores.

    Attributes:
        nothing: it is 0 everywhere.
        causal: it hides from each query the keys behind it, and nothing else; there are as many keys as queries.
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
        return Known(not total.any(), _is_causal(total), bool((total.amax(-1) >= LEAST).all()))


def _is_causal(total: torch.Tensor) -> bool:
    queries, keys = total.shape[-2:]
    if queries != keys or queries == 1:
        return False
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return bool((total[..., hidden] < ABSORBS).all()) and not total[..., ~hidden].any()


def _computed(site: Site) -> torch.Tensor | None:
    """The sum of all addends, if it depends on nothing but sizes."""
    total = torch.zeros(1, 1, 1, 1)
    for addend in site.addends:
        value = torch.zeros(1, 1, 1, 1)
        for term in addend.terms:
            node, dims = addend.source_of(term)
            found = _Computer().value(node)
            if found is None:
                return None
            found = _arranged(node, found, dims, site.scores_layout)
            if isinstance(term, Bias):
                value = value + found.float() * term.factor
            else:
                value = torch.where(found == term.hides, fill_of(term), value)
        total = total + value
    return None if total.isnan().any() else total


def _arranged(node: fx.Node, value: torch.Tensor, dims: tuple[Dim, ...], layout: tuple[Dim, ...]) -> torch.Tensor:
    for target, given in steps(g.value(node), dims, layout, repeat=False):
        value = target(value, *given)
    return value


class _Computer:
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
    return not sizes and not symbolic and value.numel() <= _MOST_ELEMENTS


def emit_mask(e: Emitter, site: Site) -> fx.Node:
    """The sum of all addends, of four dims."""
    dtype = site.forward.dtype
    found = [emit_addend(e, addend, site.scores_layout, dtype) for addend in site.addends]
    mask = found[0]
    for other in found[1:]:
        mask = e.call(aten.add.Tensor, converted(e, mask, torch.float32), converted(e, other, torch.float32))
    return mask
