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
from typing import Any

from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.traced_pattern import TracedPattern
from fusebackend.declarative.variant import Candidate
from fusebackend.declarative.verify import verify_traced
from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Level, Reject


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
    when: Callable[[Candidate], bool | str | Reject] | None = None,
    level: Level = "joint",
    priority: int = 0,
    pin: Sequence[str] = (),
    verify: bool = True,
) -> Callable[[Callable], SearchFunction]:
    """Decorates a search function. Decorate its replacement with the result's ``.replace_with``.

    Args:
        name: the pattern's name in options and reports.
        example_inputs: arguments for the search function, or a list of several such tuples, one for each combination of ranks
            and dtypes to match. Each is traced with symbolic sizes, except sizes of 0 and 1, which are part of the pattern. If a
            tensor requires grad, the pattern is also looked for in training graphs, forward and backward together, and the
            replacement must be differentiable.
        when: receives a :class:`Candidate` and returns True to accept it; otherwise False, the reason, or a Reject.
        level: ``"joint"`` (default), or ``"post_grad"`` for the graphs after partitioning into forward and backward.
        priority: of two matches that overlap, the one with the higher priority is applied; of equal ones the larger.
        pin: names of number arguments whose example value is part of the pattern. Other number arguments match any number.
        verify: compares the two functions before registering (see :mod:`fusebackend.declarative.verify`).

    Raises:
        RegistrationError: the name is taken, the functions do not fit together, or one can't be traced.
        fusebackend.VerificationError: the replacement computes something else.
    """
    options = dict(example_inputs=example_inputs, extra_check=when, level=level, priority=priority, pin=pin, verify=verify)
    return lambda search_fn: SearchFunction(name, search_fn, options)


def register_replacement(
    search_fn: Callable,
    replace_fn: Callable,
    example_inputs: Sequence[Any],
    *,
    extra_check: Callable[[Candidate], bool | str | Reject] | None = None,
    name: str | None = None,
    level: Level = "joint",
    priority: int = 0,
    pin: Sequence[str] = (),
    verify: bool = True,
) -> TracedPattern:
    """Registers a pattern in one call, with the argument names of Inductor's function. See :func:`register_pattern`."""
    name = name or search_fn.__name__
    try:
        registry.check_level(name, level)
        registry.check_priority(name, priority)
    except ValueError as error:
        raise RegistrationError(str(error)) from None
    if name in registry.known_names():
        raise _taken(name)
    pattern = TracedPattern(name, search_fn, replace_fn, example_inputs, when=extra_check, level=level, priority=priority, pin=pin)
    if verify:
        verify_traced(pattern).raise_if_wrong()
    try:
        registry.register(pattern)
    except ValueError as error:
        raise RegistrationError(str(error)) from None
    return pattern


def _taken(name: str) -> RegistrationError:
    taken = ", ".join(registry.known_names())
    return RegistrationError(f"pattern name {name!r} is taken; fusebackend.unregister({name!r}) frees it. Taken: {taken}")
