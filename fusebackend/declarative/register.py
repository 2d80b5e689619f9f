"""Registers patterns given as ordinary PyTorch: ``@register_pattern`` and ``register_replacement``.

    @fusebackend.register_pattern("silu_mul", example_inputs=(torch.randn(4, 8), torch.randn(4, 8)))
    def silu_mul(x, y):
        return torch.nn.functional.silu(x) * y

    @silu_mul.replace_with
    def _(x, y):
        return torch.ops.mylib.silu_mul(x, y)

Both functions are traced with symbolic sizes (:mod:`fusebackend.declarative.trace`), once for each example, and their results
are compared before the pattern is registered (:mod:`fusebackend.declarative.verify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from fusebackend.declarative.arguments import check_functions, check_kinds, name_of
from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.module_function import ModuleFunction
from fusebackend.declarative.traced_pattern import TracedPattern
from fusebackend.declarative.variant import Candidate
from fusebackend.declarative.verify import verify_traced
from fusebackend.log import log
from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Level, Reject

Check = Callable[[Candidate], "bool | str | Reject"]


class SearchFunction:
    """A search function that waits for its replacement, made by ``@register_pattern``. Calling it calls the function."""

    def __init__(self, name: str, search_fn: Callable, options: dict[str, Any]):
        self.name, self.search_fn, self.options = name, search_fn, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.search_fn(*args, **kwargs)

    def replace_with(self, replace_fn: Callable) -> TracedPattern:
        """Traces, verifies and registers the pattern. Returns it."""
        return register_replacement(self.search_fn, replace_fn, name=self.name, **self.options)


def register_pattern(
    name: str,
    *,
    example_inputs: Sequence[Any],
    when: Check | None = None,
    extra_check: Check | None = None,
    level: Level = "joint",
    priority: int = 0,
    pin: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] | torch.dtype | Literal["any"] | None = None,
    ranks: Sequence[int] | int | Literal["any"] | None = None,
    optional: Sequence[str] = (),
    spellings: Sequence[Callable] = (),
    roundings: Literal["fewer", "exact"] = "fewer",
    derive_backward: bool = False,
    devices: Sequence[str] | str | None = None,
    verify: bool = True,
) -> Callable[[Callable], SearchFunction]:
    """Decorates a search function. Decorate its replacement with the result's ``.replace_with``.

    Args:
        name: the pattern's name in options and reports.
        example_inputs: arguments for the search function, or a list of several such tuples, one for each combination of ranks
            and dtypes to match. Each is traced with symbolic sizes, except sizes of 0 and 1, which are part of the pattern. If a
            tensor requires grad, the pattern is also looked for in training graphs, forward and backward together, and the
            replacement must be differentiable.
        when, extra_check: receives a :class:`Candidate` and returns True to accept it; otherwise False, the reason, or a Reject. The two
            names mean the same.
        level: ``"joint"`` (default), or ``"post_grad"`` for the graphs after partitioning into forward and backward.
        priority: of two matches that overlap, the one with the higher priority is applied; of equal ones the larger.
        pin: names of number arguments whose example value is part of the pattern. Other number arguments match any number, and the
            replacement is given the one that the graph holds.
        dtypes: floating-point dtypes that the arguments may have besides those of the examples, also mixed; ``"any"``: float32, bfloat16,
            float16 and float64, without those that the replacement fails in.
        ranks: numbers of dims that the arguments with most dims may have besides those of the examples; ``"any"``. Leading dims are added
            or left out; the other arguments keep their ranks.
        optional: arguments that may be None: the pattern is looked for with and without each.
        spellings: functions of the same arguments that compute the same in other words. They are looked for and verified too.
        roundings: ``"fewer"`` also matches where the graph rounds to fewer bits between the operators and the pattern does not, as Inductor
            leaves such roundings out of the code that it generates; ``"exact"`` does not.
        derive_backward: the gradients are those of the search function, computed from its arguments, not those of the replacement: for a
            kernel without a backward. The replacement takes the place of the forward alone.
        devices: types of device (``"cuda"``) that the replacement runs on, where what is registered for its operators does not say so.
        verify: compares the two functions before registering (see :mod:`fusebackend.declarative.verify`), and where the replacement runs on
            no device of this machine, or for another dtype or rank, before it is first used.

    Raises:
        RegistrationError: the name is taken, the functions do not fit together, or one can't be traced.
        fusebackend.VerificationError: the replacement computes something else.
    """
    options = dict(
        example_inputs=example_inputs,
        when=when,
        extra_check=extra_check,
        level=level,
        priority=priority,
        pin=pin,
        dtypes=dtypes,
        ranks=ranks,
        optional=optional,
        spellings=spellings,
        roundings=roundings,
        derive_backward=derive_backward,
        devices=devices,
        verify=verify,
    )
    _check_name(name)
    return lambda search_fn: SearchFunction(name, search_fn, options)


def register_replacement(
    search_fn: Callable,
    replace_fn: Callable,
    example_inputs: Sequence[Any],
    *,
    extra_check: Check | None = None,
    when: Check | None = None,
    name: str | None = None,
    level: Level = "joint",
    priority: int = 0,
    pin: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] | torch.dtype | Literal["any"] | None = None,
    ranks: Sequence[int] | int | Literal["any"] | None = None,
    optional: Sequence[str] = (),
    spellings: Sequence[Callable] = (),
    roundings: Literal["fewer", "exact"] = "fewer",
    derive_backward: bool = False,
    devices: Sequence[str] | str | None = None,
    verify: bool = True,
) -> TracedPattern:
    """Registers a pattern in one call, with the argument names of Inductor's function. See :func:`register_pattern`.

    ``search_fn`` may be a module, and ``example_inputs`` the arguments of its ``forward``: the replacement then takes what it needs of
    these, of the parameters and buffers, and of the floating-point settings, by name.
    """
    if name is None:
        name = type(search_fn).__name__ if isinstance(search_fn, torch.nn.Module) else name_of(search_fn)
    _check_name(name)
    try:
        registry.check_level(name, level)
        registry.check_priority(name, priority)
    except ValueError as error:
        raise RegistrationError(str(error)) from None
    check_functions(name, {"search_fn": search_fn, "replace_fn": replace_fn})
    check_kinds(
        name,
        when=extra_check if when is None else when,
        spellings=spellings,
        names={"pin": pin, "optional": optional},
        flags={"derive_backward": derive_backward, "verify": verify},
        devices=devices,
    )
    if isinstance(search_fn, torch.nn.Module):
        module = ModuleFunction(search_fn)
        search_fn, replace_fn, example_inputs = module.call, module.taking(name, replace_fn), module.examples(example_inputs)
    if name in registry.known_names():
        raise _taken(name)
    if when is not None and extra_check is not None:
        raise RegistrationError(f"pattern {name!r}: when= and extra_check= are two names of one argument; give one of them")
    pattern = TracedPattern(
        name,
        search_fn,
        replace_fn,
        example_inputs,
        when=extra_check if when is None else when,
        level=level,
        priority=priority,
        pin=pin,
        dtypes=dtypes,
        ranks=ranks,
        optional=optional,
        spellings=spellings,
        roundings=roundings,
        derive_backward=derive_backward,
        on=devices,
        verify=verify,
    )
    if verify:
        verification = verify_traced(pattern)
        verification.raise_if_wrong()
        for note in verification.notes:
            log.warning("pattern %r: %s", name, note)
    try:
        registry.register(pattern)
    except ValueError as error:
        raise RegistrationError(str(error)) from None
    return pattern


def _check_name(name: Any) -> None:
    try:
        registry.check_name("name", name)
    except ValueError as error:
        raise RegistrationError(str(error)) from None


def _taken(name: str) -> RegistrationError:
    taken = ", ".join(registry.known_names())
    return RegistrationError(f"pattern name {name!r} is taken; fusebackend.unregister({name!r}) frees it. Taken: {taken}")
