"""The reports of this process's last compiles, and the collection of those within a block."""

from __future__ import annotations

import collections
import contextlib
import contextvars
from collections.abc import Iterator

from fusebackend.report.model import Report

_last: collections.deque[Report] = collections.deque(maxlen=256)
_collection: contextvars.ContextVar[list[Report] | None] = contextvars.ContextVar("collection", default=None)


def add(report: Report) -> None:
    """Adds the report of a compile that begins: to the collection that is going on, or else to the last."""
    collection = collected()
    (_last if collection is None else collection).append(report)


def last() -> list[Report]:
    """The reports since :func:`reset`, oldest first; 256 at most."""
    return list(_last)


def reset() -> None:
    """Forgets the reports so far."""
    _last.clear()


@contextlib.contextmanager
def collecting() -> Iterator[list[Report]]:
    """Compiles within are interpreted, use no cache, and their reports go into the list that this yields."""
    found: list[Report] = []
    token = _collection.set(found)
    try:
        yield found
    finally:
        _collection.reset(token)


def collected() -> list[Report] | None:
    """The reports of the block that collects them; None outside of one."""
    return _collection.get()
