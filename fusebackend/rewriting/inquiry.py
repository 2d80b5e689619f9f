"""A pattern that somebody asks about: where it comes nearest, though it is nowhere near enough to be reported as a near miss."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting import describe
from fusebackend.rewriting.outcome import Source
from fusebackend.rewriting.pattern import Pattern


@dataclasses.dataclass(frozen=True)
class Nearest:
    """One anchor at which the pattern is not.

    Attributes:
        part: how much of the pattern is there, from 0 to 1.
        reason: what differs; empty where the pattern can't say.
        found: the operator that differs, with dtype and shape.
    """

    part: float
    graph: str
    source: Source
    reason: str
    found: str


@dataclasses.dataclass
class _Inquiry:
    pattern: str | None
    found: list[Nearest] = dataclasses.field(default_factory=list)


_inquiry: contextvars.ContextVar[_Inquiry | None] = contextvars.ContextVar("inquiry", default=None)


@contextlib.contextmanager
def about(pattern: str | None) -> Iterator[list[Nearest]]:
    """Compiles within say of each anchor at which ``pattern`` is not how near it came; the list that this yields is filled with that."""
    asked = _Inquiry(pattern)
    token = _inquiry.set(asked)
    try:
        yield asked.found
    finally:
        _inquiry.reset(token)


def asks_for(name: str) -> bool:
    asked = _inquiry.get()
    return asked is not None and asked.pattern == name


def compare(pattern: Pattern, anchor: fx.Node, graph: str) -> None:
    """Notes how near ``pattern`` comes at one of its anchors, where it does not match."""
    asked, answer = _inquiry.get(), pattern.nearest(anchor)
    if asked is None:
        return
    part, reject = answer if answer is not None else (0.0, None)
    node = reject.node if reject is not None and reject.node is not None else anchor
    source = describe.source_of(node)
    if not source.file:
        source = describe.source_of(anchor)
    asked.found.append(Nearest(part, graph, source, reject.reason if reject else "", f"{g.describe(node)} {g.spec(g.value(node))}"))
