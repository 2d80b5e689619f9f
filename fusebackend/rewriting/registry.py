"""The patterns that are known in this process.

They come from the families of this package (:func:`fusebackend.rewriting.family.families`), from other packages through the
entry-point group ``fusebackend.patterns`` (each entry names a module, or a function to call, that registers), and from the user's code.
"""

from __future__ import annotations

import difflib
import functools
import threading
from importlib.metadata import entry_points

from fusebackend.log import log
from fusebackend.rewriting.family import families
from fusebackend.rewriting.pattern import Pattern

ENTRY_POINTS = "fusebackend.patterns"

_patterns: dict[str, Pattern] = {}
_lock = threading.RLock()


def register(pattern: Pattern) -> Pattern:
    """Makes a pattern known. Returns it.

    Raises:
        ValueError: the name is taken, or this is not a pattern.
    """
    if not isinstance(pattern, Pattern):
        raise ValueError(f"register: {pattern!r} is a {type(pattern).__name__}; an instance of a subclass of fusebackend.Pattern is needed")
    with _lock:
        if pattern.name in _patterns:
            raise ValueError(f"pattern name {pattern.name!r} is taken by {_patterns[pattern.name]!r}; unregister it first")
        _patterns[pattern.name] = pattern
    return pattern


def unregister(name: str) -> Pattern:
    """Forgets a pattern. Returns it. ValueError if there is none of that name."""
    with _lock:
        return _patterns.pop(known(name))


def get(name: str) -> Pattern:
    """The pattern of that name. ValueError if there is none."""
    return _patterns[known(name)]


def prioritize(name: str, priority: int) -> None:
    """Sets a pattern's priority: of two matches that overlap the higher wins, then the larger."""
    get(name).priority = priority


def known(name: str) -> str:
    """Returns ``name``. ValueError, with the closest name, if no pattern has it."""
    if name not in known_names():
        close = difflib.get_close_matches(name, known_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"no pattern is called {name!r}{hint} Known: {', '.join(known_names())}")
    return name


def known_names() -> list[str]:
    """The names of all known patterns, sorted."""
    return sorted(p.name for p in all_patterns())


def all_patterns() -> list[Pattern]:
    """Every known pattern, by descending priority, then by name."""
    with _lock:
        _load()
        return sorted(_patterns.values(), key=lambda p: (-p.priority, p.name))


@functools.cache
def _load() -> None:
    """Registers what this package and others bring along. One that fails must not take the rest with it."""
    for family in families().values():
        try:
            for pattern in family.patterns:
                register(pattern)
        except Exception:
            log.exception("the patterns of %s could not be loaded and are off", family.name)
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            if callable(found):
                found()
        except Exception:
            log.exception("the patterns of entry point %r could not be loaded and are off", entry.name)
