"""Modules as search functions: what they hold becomes arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.examples import as_tuples

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class ModuleFunction:
    """A module as a function of the arguments of its ``forward``, then of its parameters, buffers and floating-point settings.

    Args:
        module: an example. Its other settings are part of the pattern, but for sizes that are those of its parameters
            (``normalized_shape``): a module without children is taken for any size.

    Attributes:
        names: of the arguments; a dot in the name of a parameter is an underscore.
        call: the function.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        own = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is _POSITIONAL and p.default is p.empty]
        self._state = {n.replace(".", "_"): n for n, _ in [*module.named_parameters(), *module.named_buffers()]}
        leaf = not list(module.children())
        self._floats = [n for n, v in vars(module).items() if leaf and type(v) is float and not n.startswith("_")]
        self.inputs = [p.name for p in own]
        self.names = [*self.inputs, *self._state, *self._floats]
        tied, kind = _sizes_of_parameters(module), _with_methods_of(type(module))
        plain = {n: v for n, v in vars(module).items() if not n.startswith("_")}

        def of_a_leaf(given: dict[str, Any]) -> Any:
            held = kind()
            for name, value in plain.items():
                setattr(held, name, value)
            for name in (*self._state, *self._floats):
                setattr(held, name, given[name])
            for name in absent:
                setattr(held, name, None)
            for name, (parameter, sizes) in tied.items():
                shape = given[parameter].shape
                setattr(held, name, shape[sizes] if isinstance(sizes, int) else tuple(shape[d] for d in sizes))
            return held.forward(*(given[n] for n in self.inputs))

        def of_any(given: dict[str, Any]) -> Any:
            state = {name: given[argument] for argument, name in self._state.items()}
            return torch.func.functional_call(module, state, tuple(given[n] for n in self.inputs))

        absent = [n for n, p in module._parameters.items() if p is None]
        run = of_a_leaf if leaf else of_any

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(dict(zip(self.names, args)) | kwargs)

        call.__name__ = call.__qualname__ = type(module).__name__
        call.__signature__ = inspect.Signature([inspect.Parameter(n, _POSITIONAL) for n in self.names])  # type: ignore[attr-defined]
        self.call = call

    def examples(self, example_inputs: Sequence[Any]) -> list[tuple]:
        """Examples of ``forward`` with what the module holds behind them."""
        state = [p.detach().clone().requires_grad_(p.requires_grad) for p in self.module.parameters()]
        held = [*state, *self.module.buffers(), *(getattr(self.module, n) for n in self._floats)]
        return [(*example, *held) for example in as_tuples(type(self.module).__name__, example_inputs)]

    def taking(self, pattern: str, replace_fn: Callable) -> Callable:
        """A replacement of all arguments, from one of some of them.

        Raises:
            RegistrationError: it has an argument of another name.
        """
        wanted = list(inspect.signature(replace_fn).parameters)
        unknown = [n for n in wanted if n not in self.names]
        if unknown:
            has = f"{type(self.module).__name__} has {', '.join(self.names)}"
            raise RegistrationError(f"pattern {pattern!r}: the replacement takes {unknown[0]!r}; {has}")

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(self.names, args)) | kwargs
            return replace_fn(**{n: given[n] for n in wanted})

        call.__name__ = getattr(replace_fn, "__name__", "replacement")
        call.__signature__ = inspect.signature(self.call)  # type: ignore[attr-defined]
        return call


def _sizes_of_parameters(module: nn.Module) -> dict[str, tuple[str, int | tuple[int, ...]]]:
    """The settings that are sizes of a parameter: its name, and the dim or dims."""
    tied: dict[str, tuple[str, int | tuple[int, ...]]] = {}
    for name, value in vars(module).items():
        for parameter, tensor in module.named_parameters(recurse=False):
            if isinstance(value, tuple) and value and tuple(tensor.shape[-len(value) :]) == tuple(value):
                tied.setdefault(name, (parameter, tuple(range(tensor.dim() - len(value), tensor.dim()))))
            elif type(value) is int and value > 1 and value in tensor.shape:
                tied.setdefault(name, (parameter, tensor.shape.index(value)))
    return tied


def _with_methods_of(kind: type) -> type:
    """A plain class with the methods of a module's class, for tensors that are no parameters."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        found |= {n: f for n, f in vars(base).items() if isinstance(f, (types.FunctionType, staticmethod, classmethod))}
    return type(kind.__name__, (), {n: f for n, f in found.items() if n != "__init__"})
