"""The patterns that are known in this process: those of ``fusebackend.patterns``, one file a family."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from functools import cache

from .log import log
from .pattern import Pattern

_patterns: dict[str, Pattern] = {}
_lock = threading.RLock()


def register(pattern: Pattern) -> Pattern:
    """Makes a pattern known. Returns it.

    Raises:
        ValueError: the name is taken.
    """
    with _lock:
        if pattern.name in _patterns:
            raise ValueError(f"pattern name {pattern.name!r} is taken by {_patterns[pattern.name]!r}")
        _patterns[pattern.name] = pattern
    return pattern


@cache
def _load_families() -> None:
    from . import patterns

    for module in sorted(m.name for m in pkgutil.iter_modules(patterns.__path__)):
        try:
            importlib.import_module(f"{patterns.__name__}.{module}")
        except Exception:
            # One family that can't be loaded must not take the others with it.
            log.exception("the pattern family %r could not be loaded and is off", module)


def all_patterns() -> list[Pattern]:
    """Every known pattern, by descending priority, then by name."""
    _load_families()
    with _lock:
        return sorted(_patterns.values(), key=lambda p: (-p.priority, p.name))


def known_names() -> list[str]:
    return sorted(p.name for p in all_patterns())


def select(names: tuple[str, ...]) -> list[Pattern]:
    """The patterns that the option ``fuse.patterns`` asks for: names, ``"all"``, and ``"-name"`` to leave one out.

    A list that only leaves out starts from all; an empty one asks for none.
    """
    excluded = {n[1:] for n in names if n.startswith("-")}
    included = {n for n in names if not n.startswith("-")} or ({"all"} if excluded else set())
    return [p for p in all_patterns() if p.name not in excluded and ("all" in included or p.name in included)]
