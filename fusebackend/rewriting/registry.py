"""The patterns that are known in this process, in all its threads.

They come from the families of this package (:func:`fusebackend.rewriting.family.families`), from other packages through the
entry-point group ``fusebackend.patterns`` (each entry names a module, or a function to call, that registers), and from the user's code.
"""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, get_args

import torch

from fusebackend import __version__
from fusebackend.log import log
from fusebackend.rewriting.family import families
from fusebackend.rewriting.pattern import Level, Pattern

ENTRY_POINTS = "fusebackend.patterns"

_patterns: dict[str, Pattern] = {}
_origins: dict[str, str] = {}
_origin = ""  # of what is being loaded
_failed: dict[str, str] = {}
_lock = threading.RLock()
_loaded = False
_loading: int | None = None  # the thread that loads


def register(pattern: Pattern) -> Pattern:
    """Makes a pattern known. Returns it.

    A compile that has begun keeps the patterns that it began with, in whichever thread this is called.

    Raises:
        ValueError: the name is taken, or this is not a pattern.
    """
    check(pattern)
    with _lock:
        if pattern.name in _patterns:
            raise ValueError(f"pattern name {pattern.name!r} is taken by {_patterns[pattern.name]!r}; unregister it first")
        _patterns[pattern.name] = pattern
        _origins[pattern.name] = _origin
    return pattern


def origin(name: str) -> str:
    """The package and version that brought a pattern along; empty for one that the program registered."""
    with _lock:
        return _origins.get(known(name), "")


def failed_packages() -> dict[str, str]:
    """The packages whose patterns could not be loaded, each with the reason."""
    _load()
    return dict(_failed)


@contextlib.contextmanager
def _coming_from(package: str) -> Iterator[None]:
    global _origin
    before, _origin = _origin, package
    try:
        yield
    finally:
        _origin = before


def check(pattern: Any) -> None:
    """Raises ValueError, with what is accepted, if this is no pattern that a compile could use."""
    if not isinstance(pattern, Pattern):
        raise ValueError(f"register: {pattern!r} is a {type(pattern).__name__}; an instance of a subclass of fusebackend.Pattern is needed")
    name = check_name(f"register: {type(pattern).__name__}.name", getattr(pattern, "name", None))
    check_level(name, pattern.level)
    anchors: Any = getattr(pattern, "anchors", None)
    packets = torch._ops.OpOverloadPacket
    if not isinstance(anchors, (tuple, list)) or not anchors or not all(callable(a) and not isinstance(a, packets) for a in anchors):
        raise ValueError(f"pattern {name!r}: anchors={anchors!r}; a tuple of operators is needed, e.g. (torch.ops.aten.relu.default,)")
    check_priority(name, pattern.priority)


def check_name(whose: str, name: Any) -> str:
    """Returns ``name``. Raises ValueError if options and reports could not call a pattern so."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or name == "all" or name.startswith("-"):
        raise ValueError(f"{whose} is {name!r}; a string is needed, printable and not empty, not 'all', and without a '-' in front")
    return name


def check_level(name: str, level: Any) -> None:
    """Raises ValueError if graphs of that level are not rewritten."""
    if level not in get_args(Level):
        raise ValueError(f"pattern {name!r}: level={level!r}; {' or '.join(map(repr, get_args(Level)))} is accepted")


def check_priority(name: str, priority: Any) -> None:
    """Raises ValueError if priorities could not be compared with this one."""
    if not isinstance(priority, int):
        raise ValueError(f"pattern {name!r}: priority={priority!r}; an int is needed")


def unregister(name: str) -> Pattern:
    """Forgets a pattern. Returns it. ValueError if there is none of that name."""
    with _lock:
        return _patterns.pop(known(name))


def get(name: str) -> Pattern:
    """The pattern of that name. ValueError if there is none."""
    with _lock:
        return _patterns[known(name)]


def prioritize(name: str, priority: int) -> None:
    """Sets a pattern's priority: of two matches that overlap the higher wins, then the larger."""
    check_priority(name, priority)
    get(name).priority = priority


def known(name: str) -> str:
    """Returns ``name``. ValueError, with the closest name, if no pattern has it."""
    names = known_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"no pattern is called {name!r}{hint} Known: {', '.join(names)}")
    return name


def known_names() -> list[str]:
    """The names of all known patterns, sorted."""
    return sorted(p.name for p in all_patterns())


def all_patterns() -> list[Pattern]:
    """Every known pattern, by descending priority, then by name."""
    _load()
    with _lock:
        return sorted(_patterns.values(), key=lambda p: (-p.priority, p.name))


def _load() -> None:
    """Registers what this package and others bring along, once. One that fails must not take the rest with it."""
    global _loaded, _loading
    if _loaded or _loading == threading.get_ident():  # who registers asks which names are taken
        return
    from torch._dynamo.convert_frame import compile_lock

    # What an entry point registers may be traced, which needs the first lock. A compile in another thread holds it, and may wait for the
    # second: so both are taken in this order.
    with compile_lock, _lock:
        if _loaded:
            return
        _loading = threading.get_ident()
        try:
            _load_families()
            _load_entry_points()
            _loaded = True
        finally:
            _loading = None


def _load_families() -> None:
    for family in families().values():
        try:
            with _coming_from(f"fusebackend {__version__}"):
                for pattern in family.patterns:
                    if _patterns.get(pattern.name) is not pattern:
                        register(pattern)
        except Exception:
            log.exception("the patterns of %s could not be loaded and are off", family.name)


def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.name
        try:
            with _coming_from(package):
                found = entry.load()
                if callable(found):
                    found()
        except Exception as error:
            _failed[f"{package}, entry point {entry.name!r}"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            log.exception("the patterns of entry point %r could not be loaded and are off", entry.name)
