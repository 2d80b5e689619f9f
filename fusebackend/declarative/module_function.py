"""``nn.Module`` as a search function: its parameters and buffers become arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fusebackend.declarative.examples import as_tuples


def as_function(module: nn.Module) -> Callable:
    """A function of the module's arguments, then of its parameters and buffers, by their names with ``_`` for each dot.

    What the module does is what it does now: its settings and whether it trains are part of the pattern.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    own = [p.replace(annotation=p.empty) for p in own if p.default is p.empty]
    names = {name.replace(".", "_"): name for name in state}
    parameters = [*own, *(inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names)]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((p.name for p in parameters), args)) | kwargs
        held = {name: given.pop(argument) for argument, name in names.items()}
        return torch.func.functional_call(module, held, (), given)

    call.__name__ = call.__qualname__ = type(module).__name__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def with_state(module: nn.Module, example_inputs: Sequence[Any]) -> list[tuple]:
    """The examples of a module with its parameters and buffers behind them."""
    state = [*(p.detach().clone().requires_grad_(p.requires_grad) for p in module.parameters()), *module.buffers()]
    return [(*e, *state) for e in as_tuples(type(module).__name__, example_inputs)]
