"""A pattern whose search function and replacement are ordinary PyTorch functions."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from fusebackend import cache_keys
from fusebackend.declarative import sizes
from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.examples import as_tuples, requires_grad, without_grad
from fusebackend.declarative.trace import TraceError
from fusebackend.declarative.variant import Candidate, Variant
from fusebackend.identity import UnidentifiableError, check_readable
from fusebackend.native.user_kernels import library_key
from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Level, Match, Pattern, Reject


class TracedPattern(Pattern):
    """Made by :func:`fusebackend.register_pattern` and :func:`fusebackend.register_replacement`, which describe the arguments.

    Raises:
        RegistrationError: the functions or their examples do not fit together, or a function can't be traced.
    """

    def __init__(
        self,
        name: str,
        search_fn: Callable,
        replace_fn: Callable,
        example_inputs: Sequence[Any],
        *,
        when: Callable[[Candidate], bool | str | Reject] | None = None,
        level: Level = "joint",
        priority: int = 0,
        pin: Sequence[str] = (),
    ):
        self.name, self.search_fn, self.replace_fn = name, search_fn, replace_fn
        self.when, self.level, self.priority, self.pin = when, level, priority, tuple(pin)
        examples = [self._by_name(e) for e in as_tuples(name, example_inputs)]
        self._check_arguments()
        # An example that requires grad is traced a second time: training graphs hold forward and backward.
        examples = [*map(without_grad, examples), *filter(requires_grad, examples)]
        try:
            self.variants = [Variant(name, search_fn, replace_fn, e, level, self.pin) for e in examples]
        except TraceError as error:
            raise RegistrationError(f"pattern {name!r}: {error}") from error
        self.anchors = tuple(dict.fromkeys(cast(torch._ops.OpOverload, v.matcher.anchor.target) for v in self.variants))

    def match(self, node: fx.Node) -> Match | Reject | None:
        rejected = None
        for variant in self.variants:
            if variant.matcher.anchor.target is node.target:
                answer = variant.match(node, self.when)
                if isinstance(answer, Match):
                    return answer
                rejected = rejected or answer
        return rejected

    def fingerprint(self) -> str:
        for what, function in (("its search function", self.search_fn), ("its replacement", self.replace_fn), ("its check", self.when)):
            check_readable(function, what)

        def parts(v: Variant) -> Iterator[str]:
            yield v.search.graph.python_code("self").src
            yield v.replace.graph.python_code("self").src
            yield repr(sorted(v.scalars.items()))
            names = sizes.argument_names(v.search, v.tensors)
            yield from (f"{n.name} {sizes.describe(n, names)}" for n in v.search.inputs if n is not None)
            yield from (sizes.describe(n, names) for n in v.search.outputs if n is not None)
            names = sizes.argument_names(v.replace, v.tensors)
            yield from (sizes.describe(n, names) for n in v.replace.outputs if n is not None)
            yield from (library_key(n.target) for n in v.replace.graph.nodes if isinstance(n.target, torch._ops.OpOverload))

        return cache_keys.traced_pattern(self.name, self.level, self.priority, self._identity_of_check(), map(parts, self.variants))

    def __reduce__(self) -> tuple:
        # Its traces hold fake tensors and functions. Where it is read it must be registered too, as modules do when they are imported.
        if self.name not in registry.known_names() or registry.get(self.name) is not self:
            raise pickle.PicklingError(
                f"pattern {self.name!r} is not registered: a registered pattern is pickled as its name, others are not"
            )
        return registry.get, (self.name,)

    def _by_name(self, example: Sequence[Any]) -> dict[str, Any]:
        try:
            return dict(inspect.signature(self.search_fn).bind(*example).arguments)
        except TypeError as error:
            raise RegistrationError(f"pattern {self.name!r}: the example inputs do not fit the search function: {error}") from error

    def _check_arguments(self) -> None:
        searched, replaced = (list(inspect.signature(f).parameters) for f in (self.search_fn, self.replace_fn))
        if searched != replaced:
            takes = f"the search function takes ({', '.join(searched)}), the replacement ({', '.join(replaced)})"
            raise RegistrationError(f"pattern {self.name!r}: {takes}")
        unknown = [p for p in self.pin if p not in searched]
        if unknown:
            raise RegistrationError(f"pattern {self.name!r}: pin names {unknown[0]!r}; the arguments are {', '.join(searched)}")
        self._identity_of_check()

    def _identity_of_check(self) -> str:
        try:
            return cache_keys.function(self.when, f"pattern {self.name!r}: when")
        except UnidentifiableError as error:
            raise RegistrationError(str(error)) from None
