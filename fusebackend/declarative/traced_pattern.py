"""A pattern whose search function and replacement are ordinary PyTorch functions."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from fusebackend.declarative import sizes
from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.examples import as_tuples, requires_grad, without_grad
from fusebackend.declarative.fingerprint import fingerprint
from fusebackend.declarative.trace import TraceError
from fusebackend.declarative.variant import Candidate, Variant
from fusebackend.native.user_kernels import library_key
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
        # The traces contain what the functions compute, with the values that they close over: the functions need not be hashed.
        parts = [self.name, self.level, str(self.priority), fingerprint(self.when, f"pattern {self.name!r}: when")]
        for v in self.variants:
            parts += [v.search.graph.python_code("self").src, v.replace.graph.python_code("self").src, repr(sorted(v.scalars.items()))]
            names = sizes.argument_names(v.search, v.tensors)
            parts += [f"{n.name} {sizes.describe(n, names)}" for n in v.search.inputs if n is not None]
            parts += [library_key(n.target) for n in v.replace.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

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
        fingerprint(self.when, f"pattern {self.name!r}: when")  # raises if it can't be identified
