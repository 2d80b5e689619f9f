"""Resolves object references, ``package.module:function``, as users give them on the command line."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fusebackend.log import log

#: What a function that makes a model for us returns.
FACTORY_RETURNS = "(model_or_function, args) or (model_or_function, args, kwargs)"


class UsageError(ValueError):
    """An argument of the command line can't be used. The message says what was given and what is accepted."""


class CommandError(RuntimeError):
    """A command can't do its work. The message says why, so that a traceback would not help."""


class UsersCodeError(CommandError):
    """The user's own code raised. The message says what, and where."""


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turns what the block raises into :class:`UsersCodeError`; ``what`` says what it runs, as the subject of "raised"."""
    try:
        yield
    except (UsageError, UsersCodeError):
        raise
    except (Exception, SystemExit) as error:  # a script that was given as a module may exit when it is imported
        log.debug("%s raised", what, exc_info=True)
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = next(iter(str(error).splitlines()), "")
        said = f"{what} raised {type(error).__name__}: {text} ({where.filename}:{where.lineno})"
        raise UsersCodeError(f"{said}; TORCH_LOGS=+fusebackend shows the traceback") from error


def import_module(name: str, argument: str) -> ModuleType:
    """Imports a module of the user's. The current folder is searched as well.

    Args:
        argument: names it in errors.

    Raises:
        UsageError: there is no such module.
        UsersCodeError: it raises when it is imported.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{argument} takes the name of a module, e.g. package.module; got {name!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # `python -m` adds the current folder, an installed script does not
    try:
        with users_code(f"importing {name}"):
            return importlib.import_module(name)
    except UsersCodeError as error:
        missing = getattr(error.__cause__, "name", None) if isinstance(error.__cause__, ModuleNotFoundError) else None
        if not missing or not f"{name}.".startswith(f"{missing}."):
            raise  # the module exists; a module that it imports does not
        raise UsageError(f"{argument}: no module {missing!r}; looked in the current folder and the installed packages") from error


def resolve(reference: str, command: str) -> Callable:
    """Imports the function or class that ``reference`` names.

    Args:
        reference: ``package.module:function`` or ``package.module:Class.method``. The current folder is searched as well.
        command: the command that takes the reference, for the messages of errors.

    Raises:
        UsageError: the reference is malformed, or names nothing, or something that can't be called.
        UsersCodeError: its module raises when it is imported.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{command} takes package.module:function, got {reference!r}")
    found: Any = import_module(module_name, f"{command} {reference}")
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
        UsersCodeError: it raises.
    """
    factory = resolve(reference, command)
    with users_code(f"{reference}()"):
        made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        got = f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{reference}() must return {FACTORY_RETURNS}, got {got}")
    fn, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        got = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise UsageError(f"{reference}() must return {FACTORY_RETURNS}, args a tuple and kwargs a dict; got {got}")
    return fn, tuple(args), kwargs
