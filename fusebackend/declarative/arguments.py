"""The arguments of a registration: each must be of its kind, which is said before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusebackend.declarative.errors import RegistrationError


def check_functions(pattern: str, functions: Mapping[str, Any]) -> None:
    """Refuses what can't be called.

    Raises:
        RegistrationError: naming the argument.
    """
    for argument, given in functions.items():
        if not callable(given):
            raise RegistrationError(f"pattern {pattern!r}: {argument}={given!r}; a function is needed")


def check_kinds(
    pattern: str, *, when: Any = None, spellings: Any = (), names: Mapping[str, Any], flags: Mapping[str, Any], devices: Any = None
) -> None:
    """Refuses what is of another kind than its argument.

    Args:
        names: of those that name arguments of the search function.
        flags: of those that are True or False.

    Raises:
        RegistrationError: naming the argument.
    """

    def refuse(argument: str, given: Any, needed: str) -> None:
        raise RegistrationError(f"pattern {pattern!r}: {argument}={given!r}; {needed}")

    if not isinstance(spellings, (tuple, list)) or not all(map(callable, spellings)):
        refuse("spellings", spellings, "a list of functions is needed")
    if when is not None and not _takes_one(when):
        refuse("when", when, "a function of one argument, the candidate, is needed")
    for argument, given in names.items():
        if not _are_strings(given):
            refuse(argument, given, "names of arguments are needed, e.g. ('eps',)")
    for argument, given in flags.items():
        if not isinstance(given, bool):
            refuse(argument, given, "True or False is needed")
    if devices is not None and not (devices and _are_strings(devices) and all(map(_is_device_type, _as_tuple(devices)))):
        refuse("devices", devices, "types of device are needed, e.g. 'cuda' or ('cpu', 'cuda')")


def _takes_one(function: Any) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # built in: its arguments can't be told
        pass
    return True


def _as_tuple(given: Any) -> tuple:
    return (given,) if isinstance(given, str) else tuple(given)


def _are_strings(given: Any) -> bool:
    return isinstance(given, (str, tuple, list, set, frozenset)) and all(isinstance(n, str) for n in _as_tuple(given))


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def name_of(function: Callable) -> str:
    """What a pattern is called after its search function.

    Raises:
        RegistrationError: the function has no name.
    """
    name = getattr(function, "__name__", None)
    if name is None:
        raise RegistrationError(f"register_replacement: search_fn={function!r} has no name; give the pattern one: name=")
    return name
