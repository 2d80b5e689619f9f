"""``replace_module``: registers a kernel for a class of layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.register import register_replacement
from fusebackend.declarative.traced_pattern import TracedPattern


def replace_module(
    kind: type[nn.Module], replace_fn: Callable, *, example: tuple[Any, ...], name: str | None = None, **settings: Any
) -> TracedPattern:
    """Registers what replaces the computation of a layer.

        example = nn.RMSNorm(8, eps=1e-6), torch.randn(2, 3, 8)
        fusebackend.replace_module(nn.RMSNorm, lambda x, weight, eps: kernel(x, weight, eps), example=example)

    It is a pattern like any other: verified, reported, and found wherever a graph computes the same, in whichever layer.

    Args:
        kind: the class.
        replace_fn: takes what it needs of the arguments of ``forward``, the parameters and buffers, and the floating-point settings, all by
            their names in the class.
        example: a layer of that class, then the arguments of its ``forward``. Sizes are any, other settings part of the pattern. With
            parameters that require grad the pattern is also looked for in training.
        name: in options and reports; by default that of the class.
        settings: see :func:`fusebackend.register_pattern`. ``dtypes="any"`` and ``ranks="any"`` are the defaults here.

    Raises:
        RegistrationError: the example is not of the class, or see :func:`fusebackend.register_pattern`.
        fusebackend.VerificationError: the replacement computes something else.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RegistrationError(f"replace_module: {kind!r} is no class of modules, e.g. torch.nn.RMSNorm")
    if not isinstance(example, tuple) or len(example) < 2 or not isinstance(example[0], kind):
        given = f"({', '.join(type(e).__name__ for e in example)})" if isinstance(example, tuple) else type(example).__name__
        needed = f"in a tuple a {kind.__name__} and the arguments of its forward are needed"
        raise RegistrationError(f"replace_module: example={given}; {needed}")
    unknown = [n for n in settings if n not in inspect.signature(register_replacement).parameters]
    if unknown:
        known = ", ".join(inspect.getfullargspec(register_replacement).kwonlyargs)
        raise RegistrationError(f"replace_module: there is no argument {unknown[0]!r}; further ones are {known}")
    module, *inputs = example
    return register_replacement(
        module, replace_fn, tuple(inputs), name=kind.__name__ if name is None else name, **{"dtypes": "any", "ranks": "any", **settings}
    )
