"""The example inputs that a pattern is traced with, and the numbers among them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusebackend.declarative.errors import RegistrationError


def as_tuples(pattern: str, given: Sequence[Any]) -> list[tuple]:
    """The examples of a pattern: ``given`` is the arguments of one call, the only one, or a list of several such tuples.

    Raises:
        RegistrationError: an example without a tensor, or with one without data, or what is no tuple or list.
    """
    if isinstance(given, torch.Tensor):
        return [(given,)]
    if not isinstance(given, (tuple, list)):
        raise RegistrationError(f"pattern {pattern!r}: example_inputs={given!r}; a tuple of arguments is needed, or a list of such tuples")
    several = isinstance(given, list) and given and all(isinstance(e, (tuple, list)) for e in given)
    examples = [tuple(e) for e in given] if several else [tuple(given)]
    for example in examples:
        if not any(isinstance(v, torch.Tensor) for v in example):
            raise RegistrationError(f"pattern {pattern!r}: example_inputs must hold a tensor, got {example!r}")
        if any(isinstance(v, torch.Tensor) and v.is_meta for v in example):
            raise RegistrationError(f"pattern {pattern!r}: example_inputs hold a tensor on the device 'meta'; tensors with data are needed")
    return examples


def without_optional(example: Mapping[str, Any], optional: Sequence[str]) -> list[dict[str, Any]]:
    """The example, and it without each combination of the ``optional`` arguments, which are None then."""
    chosen = [n for n in optional if example.get(n) is not None]
    combinations = itertools.chain.from_iterable(itertools.combinations(chosen, k) for k in range(len(chosen) + 1))
    return [{**example, **dict.fromkeys(left_out)} for left_out in combinations]


def requires_grad(example: Mapping[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in example.values())


def without_grad(example: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in example.items()}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def stand_in(index: int, kind: type, other: bool = False) -> int | float:
    """A number that no program contains by chance. Where a trace contains it, it stands for the ``index``-th number argument.

    Args:
        other: another one, to which no rule leads that also leads to the first.
    """
    if kind is float:
        return (11.3719 if other else 0.5317) + 1e-9 * (7919 * index + 1)
    return (3571913 if other else 7368787) + 104729 * index
