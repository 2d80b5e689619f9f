"""What made a function untraceable, in a line: the innermost cause, the line of the user's code, and what to change."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator

import torch
from torch._dynamo.exc import ObservedException, TorchDynamoException
from torch._subclasses.fake_tensor import UnsupportedOperatorException

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)

# How Dynamo writes a constant: ConstantVariable(str: 'a')
_CONSTANT = re.compile(r"""ConstantVariable\(\w+: ("[^"]*"|'[^']*')\)""")

# What a cause contains, and what helps.
_CURES = (
    ("data-dependent", "a pattern is one graph whatever the values: use torch.where, or a when= that looks at sizes"),
    ("Failed to trace builtin", "a pattern may only compute: move this out of the function"),
    ("Mismatch in dtype", "convert to one dtype within the function"),
    ("no autograd formula", "or let derive_backward=True take the search function's gradients"),
    ("does not require grad", "the result must depend on the examples that require grad by differentiable operators"),
)


def explained(error: BaseException) -> str:
    """``the fake does not like this (RuntimeError at model.py:12: return kernel(x)); ...``"""
    causes = [*_causes(error)]
    cause = causes[-1]
    refused = next((c for c in causes if isinstance(c, UnsupportedOperatorException)), None)
    if refused is not None:
        name = str(refused).strip().removesuffix(".default").replace(".", "::", 1)
        said, cure = f"the operator {name} has no fake", f'register one: torch.library.register_fake("{name}")'
    else:
        said = _text(cause)
        found = next((c for words, c in _CURES if words.lower() in f"{said} {error}".lower()), "")
        cure = found
    of_dynamo = isinstance(cause, (TorchDynamoException, UnsupportedOperatorException)) and not isinstance(cause, ObservedException)
    # What the function itself raised has a class of Dynamo's: ObservedKeyError.
    kind = "" if of_dynamo or refused else f"{type(cause).__name__.removeprefix('Observed')}: "
    where = _line(cause, error)
    return f"{kind}{said}" + (f", at {where}" if where else "") + (f" ({cure})" if cure else "")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, as far as that is a reason and no detail of Python's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, UnsupportedOperatorException):
            return
        inner = getattr(error, "inner_exception", None)
        hidden = error.__suppress_context__ and not isinstance(error, TorchDynamoException)
        observed = isinstance(error, ObservedException)  # what follows is what the user's own line raised
        error = inner if isinstance(inner, BaseException) else error.__cause__ or (None if hidden else error.__context__)
        if isinstance(error, (StopIteration, KeyError, AttributeError)) and not observed:  # a lookup within PyTorch that found nothing
            return


def _text(error: BaseException) -> str:
    """The explanation that Dynamo gives, or the first line."""
    text = str(error).strip()
    explanation = re.search(r"^\s*Explanation: (\S.*)$", text, re.MULTILINE) if isinstance(error, TorchDynamoException) else None
    first = next(iter(text.splitlines()), type(error).__name__)
    return _CONSTANT.sub(r"\1", explanation[1] if explanation else first).rstrip(". ")


def _line(cause: BaseException, error: BaseException) -> str:
    """The innermost line of neither PyTorch nor this package."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(cause.__traceback__)]
    frames = [*((m["file"], int(m["line"])) for m in _FRAME.finditer(str(error))), *frames]
    users = [f for f in frames if not f[0].startswith((_TORCH, _OWN)) and "importlib" not in f[0] and "contextlib" not in f[0]]
    stdlib = os.path.dirname(os.__file__) + os.sep
    users = [f for f in users if not f[0].startswith(stdlib) or "site-packages" in f[0]]
    if not users:
        return ""
    file, number = users[-1]
    code = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}:{number}" + (f": {code}" if code else "")
