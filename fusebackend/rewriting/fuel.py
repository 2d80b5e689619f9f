"""Limits how many substitutions are applied, so that a wrong result can be bisected (option ``fuse.fuel``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fusebackend.rewriting.outcome import Substitution


class Fuel:
    """How many substitutions may still be applied, and which were. A limit of None is no limit."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.applied: list[Substitution] = []

    @property
    def empty(self) -> bool:
        return self.limit is not None and len(self.applied) >= self.limit


_shared: dict[int, Fuel] = {}
#: Of the process, not of a thread or a context: on GPUs autograd compiles backward graphs in a thread of its own.
_forced: list[Fuel] = []


def fuel_for(limit: int | None) -> Fuel | None:
    """The fuel of a compile with this limit; None where nothing is limited.

    All compiles with the same limit share theirs until :func:`reset`, so that a graph break does not renew it.
    """
    if _forced:
        return _forced[-1]
    return None if limit is None else _shared.setdefault(limit, Fuel(limit))


def reset() -> None:
    """Forgets what was applied so far."""
    _shared.clear()


@contextlib.contextmanager
def forced_fuel(fuel: Fuel) -> Iterator[Fuel]:
    """Compiles within share ``fuel``, whatever their options say and in whichever thread, and use no cache."""
    _forced.append(fuel)
    try:
        yield fuel
    finally:
        _forced.pop()
