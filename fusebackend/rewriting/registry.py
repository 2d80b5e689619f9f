"""The patterns that are known in this process, and which of them are on.

They come from ``fusebackend.patterns`` (one package a family), from other packages through the entry-point group
``fusebackend.patterns`` (each entry names a module, or a function to call, that registers), and from the user's code.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import threading
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points

from fusebackend.log import log
from fusebackend.rewriting.family import Family
from fusebackend.rewriting.pattern import Pattern

GROUP = "fusebackend.patterns"

_patterns: dict[str, Pattern] = {}
_families: dict[str, Family] = {}
_disabled: frozenset[str] = frozenset()
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
        return _patterns.pop(_known(name))


def get(name: str) -> Pattern:
    """The pattern of that name. ValueError if there is none."""
    return _patterns[_known(name)]


def prioritize(name: str, priority: int) -> None:
    """Sets a pattern's priority: of two matches that overlap the higher wins, then the larger."""
    get(name).priority = priority


class _Switch:
    """Has taken effect when it is made; used in a ``with`` statement it is taken back at the end of the block."""

    def __init__(self, disabled: frozenset[str]):
        global _disabled
        with _lock:
            self._before, _disabled = _disabled, disabled

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        global _disabled
        _disabled = self._before


def disable(*names: str) -> _Switch:
    """Switches patterns off, for all compiles to come or for a block: ``with fusebackend.disable("matmul"): ...``."""
    return _Switch(_disabled | {_known(n) for n in names})


def enable(*names: str) -> _Switch:
    """Switches patterns on again, for all compiles to come or for a block."""
    return _Switch(_disabled - {_known(n) for n in names})


def _known(name: str) -> str:
    if name not in known_names():
        close = difflib.get_close_matches(name, known_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no pattern is called {name!r}{hint} Known: {', '.join(known_names())}")
    return name


@cache
def _load_families() -> None:
    patterns = importlib.import_module("fusebackend.patterns")

    def guarded(what: str, load: Callable[[], object]) -> None:
        try:
            load()
        except Exception:
            # One family that can't be loaded must not take the others with it.
            log.exception("the patterns of %s could not be loaded and are off", what)

    def load_family(name: str) -> None:
        family = importlib.import_module(f"{patterns.__name__}.{name}").FAMILY
        if family.name in _families:
            return
        _families[family.name] = family
        for pattern in family.patterns:
            register(pattern)

    for module in sorted(m.name for m in pkgutil.iter_modules(patterns.__path__)):
        guarded(module, partial(load_family, module))
    for entry in entry_points(group=GROUP):

        def load(entry: EntryPoint = entry) -> None:
            found = entry.load()
            if callable(found):
                found()

        guarded(f"entry point {entry.name!r}", load)


def all_patterns() -> list[Pattern]:
    """Every known pattern, by descending priority, then by name."""
    with _lock:
        _load_families()
        return sorted(_patterns.values(), key=lambda p: (-p.priority, p.name))


def families() -> dict[str, Family]:
    """The families that ship with this package, by name."""
    with _lock:
        _load_families()
        return dict(_families)


def known_names() -> list[str]:
    return sorted(p.name for p in all_patterns())


def select(names: tuple[str, ...]) -> list[Pattern]:
    """The patterns that the option ``fuse.patterns`` asks for: names, ``"all"``, and ``"-name"`` to leave one out.

    A list that only leaves out starts from all; an empty one asks for none.
    """
    excluded = {n[1:] for n in names if n.startswith("-")}
    included = {n for n in names if not n.startswith("-")} or ({"all"} if excluded else set())
    off = excluded | (_disabled - included)  # naming a pattern in the options switches it on
    return [p for p in all_patterns() if p.name not in off and ("all" in included or p.name in included)]
