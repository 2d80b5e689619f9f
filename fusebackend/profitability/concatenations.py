"""What a replacement costs where a concatenation reads what it reads.

Inductor computes the parts of a concatenation right where they lie in the result, and lets its own loops read them there. What an opaque
call reads has a memory of its own, from which the part is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import streamed

aten = torch.ops.aten


def copies_of_parts(matched: Collection[fx.Node]) -> tuple[Work, ...]:
    """The copies that a replacement makes necessary: of what the matched nodes read and Inductor computes inside of a concatenation."""
    return tuple(_copy(g.value(part)) for part in _parts(matched) if _made_of(part, matched))


def _made_of(part: fx.Node, matched: Collection[fx.Node]) -> list[fx.Node]:
    """The concatenations besides the matched nodes that hold the part as Inductor computes it; none where a call reads it already."""
    found = [u for u in part.users if u.target is aten.cat.default and u not in matched and _is_made(u)]
    if not found or not g.is_fusable(part):  # most often there is none, which is told at once
        return []
    return found if all(g.is_fusable(r) or r.op == "output" for r in g.consumers(part)) else []


def concatenations(matched: Collection[fx.Node]) -> list[fx.Node]:
    """Those for whose parts :func:`copies_of_parts` counts."""
    return [c for part in _parts(matched) for c in _made_of(part, matched)]


def _parts(matched: Collection[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(g.through_views(n) for n in g.inputs_of(matched)))


def _is_made(concatenation: fx.Node) -> bool:
    """On GPUs pointwise loops compute a concatenation as they read it."""
    if g.value(concatenation).device.type == "cpu":
        return True
    readers = g.consumers(concatenation)
    return not all(isinstance(r.target, torch._ops.OpOverload) and torch.Tag.pointwise in r.target.tags for r in readers)


def _copy(part: torch.Tensor) -> Work:
    return dataclasses.replace(streamed(2.0 * part.itemsize * (g.hint(part.numel()) or 0), part), around=True)
