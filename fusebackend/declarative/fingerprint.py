"""Identifies a user's function by what it does, so that compiled graphs can be cached."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from fusebackend.declarative.errors import RegistrationError


def fingerprint(value: Any, where: str, seen: frozenset[int] = frozenset()) -> str:
    """A text that identifies a function, with all that it closes over and the globals that it reads, in every process."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch._ops.OpOverload, torch.Size)):
        return repr(value)
    if id(value) in seen:
        return "recursion"
    seen = seen | {id(value)}
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [fingerprint(v, where, seen) for v in value]
        return f"{type(value).__name__}({', '.join(sorted(items) if isinstance(value, (set, frozenset)) else items)})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{fingerprint(k, where, seen)}: {fingerprint(v, where, seen)}' for k, v in value.items())})"
    if inspect.ismodule(value) or inspect.isclass(value) or inspect.isbuiltin(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if inspect.isfunction(value):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        closed = [f"{n}={fingerprint(c.cell_contents, f'{where} closes over {n!r}', seen)}" for n, c in cells]
        codes = _codes(value.__code__)
        names = sorted({n for code in codes for n in code.co_names if n in value.__globals__})
        read = [f"{n}={fingerprint(value.__globals__[n], f'{where} reads the global {n!r}', seen)}" for n in names]
        text = [(c.co_code, c.co_names, [repr(k) for k in c.co_consts if not inspect.iscode(k)]) for c in codes]
        return repr((text, closed, read, fingerprint(value.__defaults__, where, seen)))
    raise RegistrationError(
        f"{where}, a {type(value).__name__}: compiled graphs are cached by what a pattern does, and this value can't be identified across "
        "processes; numbers, strings, dtypes, containers of them, functions, classes and modules are accepted"
    )


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A function's code and that of the functions inside it."""
    return [code, *(inner for constant in code.co_consts if inspect.iscode(constant) for inner in _codes(constant))]
