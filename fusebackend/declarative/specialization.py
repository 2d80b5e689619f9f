"""Other dtypes and ranks than those of a pattern's examples: which are accepted, which a graph holds, and examples that have them.

A trace holds for one rank and one dtype of each argument. A pattern that is registered for several is first looked for loosely, whatever
the ranks and dtypes; what is found so says which example to trace, once, and that trace is then matched strictly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from fusebackend import fx_utils as g
from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.partial_match import SubgraphMatch
from fusebackend.declarative.variations import random_like

#: What ``dtypes="any"`` stands for.
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_NEW_SIZES = (3, 5, 7, 11, 13, 2, 17, 19)  # of dims that are added: different ones, since equal sizes would be one symbol


@dataclasses.dataclass(frozen=True)
class Accepted:
    """The dtypes and ranks that a pattern is registered for besides those of its examples. None: no others.

    Attributes:
        dtypes: of arguments that are floating-point in the example.
        ranks: of the arguments with most dims; the others keep their ranks.
        any_dtype: whether all of :data:`FLOATING` were asked for by ``"any"``: those that the replacement can't do are left out.
    """

    dtypes: tuple[torch.dtype, ...] | None = None
    ranks: tuple[int, ...] | Literal["any"] | None = None
    any_dtype: bool = False

    @classmethod
    def parse(cls, pattern: str, dtypes: Any, ranks: Any) -> Accepted:
        """From the arguments of ``register_pattern``.

        Raises:
            RegistrationError: naming the argument.
        """
        if isinstance(dtypes, str) and dtypes == "any":
            found: Any = FLOATING
        else:
            found = None if dtypes is None else _as_tuple(dtypes)
            wrong = [d for d in found or () if not isinstance(d, torch.dtype) or not d.is_floating_point]
            if wrong or found == ():
                accepted = "'any', or floating-point dtypes, e.g. (torch.float32, torch.bfloat16), are accepted"
                raise RegistrationError(f"pattern {pattern!r}: dtypes={dtypes!r}; {accepted}")
        if not (isinstance(ranks, str) and ranks == "any") and ranks is not None:
            given, ranks = ranks, _as_tuple(ranks)
            if not ranks or not all(type(r) is int and r > 0 for r in ranks):
                raise RegistrationError(f"pattern {pattern!r}: ranks={given!r}; 'any', or numbers of dims, e.g. (2, 3), are accepted")
        return cls(found, ranks, dtypes == "any" if isinstance(dtypes, str) else False)

    @property
    def several(self) -> bool:
        return self.dtypes is not None or self.ranks is not None


@dataclasses.dataclass(frozen=True)
class Form:
    """The dtype and rank of each tensor argument, by name. Hashable: a pattern is traced once for each."""

    dtypes: tuple[tuple[str, torch.dtype], ...]
    ranks: tuple[tuple[str, int], ...]

    @classmethod
    def of_example(cls, example: Mapping[str, Any]) -> Form:
        tensors = {n: v for n, v in example.items() if isinstance(v, torch.Tensor)}
        return cls(tuple((n, t.dtype) for n, t in tensors.items()), tuple((n, t.dim()) for n, t in tensors.items()))

    @classmethod
    def of_match(cls, variant: Any, found: SubgraphMatch) -> Form:
        bound = {n: found.inputs[p] for n, p in zip(variant.tensors, variant.search.inputs) if p in found.inputs}
        dtypes = tuple((n, g.value(b.node).dtype) for n, b in bound.items())
        return cls(dtypes, tuple((n, len(b.shape)) for n, b in bound.items()))

    def __str__(self) -> str:
        ranks = dict(self.ranks)
        return ", ".join(f"{n} {str(d).removeprefix('torch.')} of rank {ranks[n]}" for n, d in self.dtypes)


def why_not(form: Form, example: Mapping[str, Any], accepted: Accepted) -> str | None:
    """Why a pattern is not traced for ``form``; empty where no form of it could be that; None if it may be."""
    own = Form.of_example(example)
    for (name, dtype), (_, given) in zip(form.dtypes, own.dtypes):
        allowed = (given, *(accepted.dtypes or ())) if given.is_floating_point else (given,)
        if dtype not in allowed:
            names = ", ".join(str(d) for d in dict.fromkeys(allowed))
            return f"wrong dtype: {name} is {dtype}, the pattern is registered for {names}"
    ranks, top = dict(own.ranks), max(r for _, r in own.ranks)
    shift = {rank - ranks[name] for name, rank in form.ranks if ranks[name] == top}
    rank = next(rank for name, rank in form.ranks if ranks[name] == top)
    if len(shift) > 1 or any(r != ranks[name] for name, r in form.ranks if ranks[name] != top):
        return ""  # more dims than leading ones are others
    if accepted.ranks != "any" and rank not in (top, *(accepted.ranks or ())):
        return (
            f"wrong rank: {rank} where the pattern was registered with {', '.join(map(str, dict.fromkeys((top, *(accepted.ranks or ())))))}"
        )
    return None


def example_of(form: Form, example: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the dtypes and ranks of ``form``, otherwise like ``example``."""
    made = dict(example)
    used = {s for v in example.values() if isinstance(v, torch.Tensor) for s in v.shape}
    fresh = [s for s in _NEW_SIZES if s not in used]
    ranks = dict(form.ranks)
    for name, dtype in form.dtypes:
        given = example[name]
        more = ranks[name] - given.dim()
        if more == 0 and dtype == given.dtype:
            continue
        shape = [*reversed(fresh[:more]), *given.shape] if more > 0 else list(given.shape[-more:])
        like = given.detach().to(dtype).requires_grad_(given.requires_grad)
        made[name] = random_like(like, shape)
    return made


def with_dtype(example: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The example with all its floating-point tensors in one dtype."""
    return {
        n: v.detach().to(dtype).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in example.items()
    }


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
