"""Which of the known patterns are on: by the switches of this process, and by the option ``fuse.patterns`` of one compile."""

from __future__ import annotations

import threading

from fusebackend.rewriting.pattern import Pattern
from fusebackend.rewriting.registry import all_patterns, known

_disabled: frozenset[str] = frozenset()
_lock = threading.Lock()


class Switch:
    """Takes effect when it is made. Used in a ``with`` statement, it is taken back at the end of the block."""

    def __init__(self, disabled: frozenset[str]):
        global _disabled
        with _lock:
            self._before, _disabled = _disabled, disabled

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        global _disabled
        _disabled = self._before


def disable(*names: str) -> Switch:
    """Switches patterns off, for all later compiles or for a block: ``with fusebackend.disable("fp32_matmul"): ...``.

    Raises:
        ValueError: no pattern of that name.
    """
    return Switch(_disabled | set(map(known, names)))


def enable(*names: str) -> Switch:
    """Switches patterns on again, for all later compiles or for a block.

    Raises:
        ValueError: no pattern of that name.
    """
    return Switch(_disabled - set(map(known, names)))


def select(names: tuple[str, ...]) -> list[Pattern]:
    """The patterns that the option ``fuse.patterns`` asks for: names, ``"all"``, and ``"-name"`` to leave one out.

    A list that only leaves out starts from all; an empty one asks for none. Naming a pattern switches it on.
    """
    excluded = {n[1:] for n in names if n.startswith("-")}
    included = {n for n in names if not n.startswith("-")} or ({"all"} if excluded else set())
    off = excluded | (_disabled - included)
    return [p for p in all_patterns() if p.name not in off and ("all" in included or p.name in included)]
