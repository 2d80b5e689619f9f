"""Which of the known patterns are on: by the switches of this process, and by the option ``fuse.patterns`` of one compile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fusebackend.rewriting.pattern import Pattern
from fusebackend.rewriting.registry import all_patterns, known

_disabled: set[str] = set()
_blocks: list[Switch] = []  # those that are open, in the order in which they were entered
_lock = threading.Lock()


class Switch:
    """Takes effect when it is made, in all threads. Used in a ``with`` statement, it is taken back at the end of the block."""

    def __init__(self, names: frozenset[str], off: bool):
        self._names, self._off = names, off
        with _lock:
            self._changed = names - _disabled if off else names & _disabled
            self._apply(_disabled)

    def _apply(self, disabled: set[str]) -> None:
        (disabled.update if self._off else disabled.difference_update)(self._names)

    def __enter__(self) -> None:
        # From a change for good to one of the block. Blocks of several threads may end in any order.
        with _lock:
            (_disabled.difference_update if self._off else _disabled.update)(self._changed)
            _blocks.append(self)

    def __exit__(self, *_: object) -> None:
        with _lock:
            _blocks.remove(self)


def disable(*names: str) -> Switch:
    """Switches patterns off, for all later compiles or for a block: ``with fusebackend.disable("fp32_matmul"): ...``.

    Args:
        names: of patterns; ``"all"`` for those that are known now.

    Raises:
        ValueError: no pattern of that name, or no name.
    """
    return Switch(_named("disable", names), off=True)


def enable(*names: str) -> Switch:
    """Switches patterns on again, for all later compiles or for a block.

    Args:
        names: of patterns; ``"all"`` for those that are known now.

    Raises:
        ValueError: no pattern of that name, or no name.
    """
    return Switch(_named("enable", names), off=False)


def _named(function: str, names: Sequence[str]) -> frozenset[str]:
    if not names:
        raise ValueError(f'{function}() takes names of patterns, or "all"; got none')
    named = [[p.name for p in all_patterns()] if name == "all" else [known(name)] for name in names]
    return frozenset(n for some in named for n in some)


def select(names: Sequence[str], among: Sequence[Pattern] | None = None) -> list[Pattern]:
    """The patterns that the option ``fuse.patterns`` asks for: names, ``"all"``, and ``"-name"`` to leave one out.

    A list that only leaves out starts from all; an empty one asks for none, and one with ``"-all"`` for those that it names. Naming a
    pattern switches it on.

    Args:
        among: the known patterns (:func:`fusebackend.rewriting.registry.all_patterns`) at the time that counts; None is now.
    """
    excluded = {n[1:] for n in names if n.startswith("-")}
    included = ({n for n in names if not n.startswith("-")} or ({"all"} if excluded else set())) - excluded
    with _lock:
        disabled = set(_disabled)
        for block in _blocks:
            block._apply(disabled)
    off = excluded | (disabled - included)
    patterns = all_patterns() if among is None else among
    return [p for p in patterns if p.name not in off and ("all" in included or p.name in included)]
