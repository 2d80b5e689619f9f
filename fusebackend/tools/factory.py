"""What a user names on the command line as ``package.module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

MADE = "(model_or_function, args) or (model_or_function, args, kwargs)"


class UsageError(ValueError):
    """What was given on the command line can't be used; says what was given and what is accepted."""


def find(name: str, what: str) -> Callable:
    """What ``package.module:function`` names. UsageError if there is no such thing, or it can't be called."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{what} takes package.module:function, got {name!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m fusebackend` has it; an installed script would not
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise UsageError(f"no module {error.name!r} for {name!r}; looked in the current folder and the installed packages") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(n for n, v in vars(found).items() if callable(v) and getattr(v, "__module__", None) == module_name)
            raise UsageError(f"{module_name} has no {part!r}; its own callables: {names or 'none'}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name} must be a function, got {type(found).__name__}")
    return found


def made_by(name: str, what: str) -> tuple[Callable, tuple, dict]:
    """The function or module, its args and kwargs, that the factory ``package.module:function`` returns.

    Args:
        what: who asks, for the message of an error.

    Raises:
        UsageError: there is no such factory, or it returns something else.
    """
    factory = find(name, what)
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        what = f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{name}() must return {MADE}, got {what}")
    fn, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise UsageError(
            f"{name}() must return {MADE}, args a tuple and kwargs a dict; got {type(args).__name__} and {type(kwargs).__name__}"
        )
    return fn, tuple(args), kwargs
