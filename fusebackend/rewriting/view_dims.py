"""What becomes of a tensor's dims behind views: for each dim of a result those of the tensor that it runs along, outermost first.

Dims of size 1 run along none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from fusebackend import fx_utils as g

aten, prims = torch.ops.aten, torch.ops.prims


def _unchanged(view: fx.Node, dims: list[list[int]]) -> list[list[int]] | None:
    return dims


def _permuted(view: fx.Node, dims: list[list[int]]) -> list[list[int]] | None:
    return [dims[d] for d in g.arguments(view)["dims"]]


def _unsqueezed(view: fx.Node, dims: list[list[int]]) -> list[list[int]] | None:
    at = g.arguments(view)["dim"] % (len(dims) + 1)
    return [*dims[:at], [], *dims[at:]]


def _squeezed(view: fx.Node, dims: list[list[int]]) -> list[list[int]] | None:
    at = g.arguments(view)["dim"] % len(dims)
    return dims if dims[at] else [*dims[:at], *dims[at + 1 :]]


def _reshaped(view: fx.Node, dims: list[list[int]]) -> list[list[int]] | None:
    """Dims that a reshape merges. One that it splits is not followed, nor symbolic sizes."""
    before, after = g.value(view.all_input_nodes[0]).shape, g.value(view).shape
    if not all(isinstance(n, int) and n > 0 for n in (*before, *after)):
        return None
    found, at = [], 0
    for size in after:
        merged, count = [], 1
        while count < size:
            if at == len(before):
                return None
            merged += dims[at]
            count *= before[at]
            at += 1
        if count != size:
            return None
        found.append(merged)
    return found if math.prod(before[at:]) == 1 else None


#: By operator: of the node and its input's dims those of its result; None where that is not known.
FOLLOWED: dict[object, Callable[[fx.Node, list[list[int]]], list[list[int]] | None]] = {
    prims.convert_element_type.default: _unchanged,
    aten.permute.default: _permuted,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _squeezed,
    aten.reshape.default: _reshaped,
    aten.view.default: _reshaped,
}
