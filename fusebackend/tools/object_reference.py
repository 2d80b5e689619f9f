"""Resolves object references, ``package.module:function``, as users give them on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

#: What a function that makes a model for us returns.
FACTORY_RETURNS = "(model_or_function, args) or (model_or_function, args, kwargs)"


class UsageError(ValueError):
    """An argument of the command line can't be used. The message says what was given and what is accepted."""


def resolve(reference: str, command: str) -> Callable:
    """Imports the function or class that ``reference`` names.

    Args:
        reference: ``package.module:function`` or ``package.module:Class.method``. The current folder is searched as well.
        command: the command that takes the reference, for the messages of errors.

    Raises:
        UsageError: the reference is malformed, or names nothing, or something that can't be called.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{command} takes package.module:function, got {reference!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # `python -m` adds the current folder, an installed script does not
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; a module that it imports does not
        searched = "looked in the current folder and the installed packages"
        raise UsageError(f"no module {error.name!r} for {reference!r}; {searched}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(n for n, v in vars(found).items() if callable(v) and getattr(v, "__module__", None) == module_name)
            raise UsageError(f"{module_name} has no {part!r}; its own callables: {names or 'none'}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{reference} must be a function, got {type(found).__name__}")
    return found


def call_factory(reference: str, command: str) -> tuple[Callable, tuple, dict]:
    """Calls the factory that ``reference`` names.

    Args:
        reference, command: see :func:`resolve`.

    Returns:
        The function or module that the factory made, and the args and kwargs to call it with.

    Raises:
        UsageError: there is no such factory, or it returns something else than :data:`FACTORY_RETURNS`.
    """
    made = resolve(reference, command)()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        got = f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{reference}() must return {FACTORY_RETURNS}, got {got}")
    fn, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        got = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise UsageError(f"{reference}() must return {FACTORY_RETURNS}, args a tuple and kwargs a dict; got {got}")
    return fn, tuple(args), kwargs
