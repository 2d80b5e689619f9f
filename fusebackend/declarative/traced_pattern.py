"""A pattern whose search function and replacement are ordinary PyTorch functions."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import fx

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.declarative import devices, sizes, wordings
from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.examples import as_tuples, requires_grad, without_grad, without_optional
from fusebackend.declarative.node_comparison import equivalent_targets
from fusebackend.declarative.precision import is_cast
from fusebackend.declarative.specialization import Accepted, Form, example_of, why_not
from fusebackend.declarative.trace import TraceError, outside_of_compiles
from fusebackend.declarative.variant import Candidate, Variant
from fusebackend.declarative.verify import verify_variant, why_wrong
from fusebackend.identity import UnidentifiableError, check_readable
from fusebackend.log import log
from fusebackend.native.user_kernels import library_key
from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Level, Match, Pattern, Reject


class TracedPattern(Pattern):
    """Made by :func:`fusebackend.register_pattern` and :func:`fusebackend.register_replacement`, which describe the arguments.

    Attributes:
        variants: the traces of the examples, in the search function's own words.
        left_out: dtypes that ``dtypes="any"`` includes and the replacement can't do, each with the reason.
        verifies: whether a replacement is compared with the search function before it is used.

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
        dtypes: Any = None,
        ranks: Any = None,
        optional: Sequence[str] = (),
        spellings: Sequence[Callable] = (),
        roundings: Literal["fewer", "exact"] = "fewer",
        derive_backward: bool = False,
        on: Sequence[str] | str | None = None,
        verify: bool = True,
    ):
        self.name, self.search_fn, self.replace_fn = name, search_fn, replace_fn
        self.when, self.level, self.priority, self.pin = when, level, priority, _names(pin)
        self.optional, self.spellings, self.roundings, self.verifies = _names(optional), tuple(spellings), roundings, verify
        self.derive_backward = derive_backward
        self.on = None if on is None else frozenset(_names(on))
        self.accepted = Accepted.parse(name, dtypes, ranks)
        self._check_arguments()
        given = [self._by_name(example) for example in as_tuples(name, example_inputs)]
        self._check_pinned(given)
        examples = [e for example in given for e in without_optional(example, self.optional)]
        # An example that requires grad is traced a second time: training graphs hold forward and backward.
        examples = [*map(without_grad, examples), *filter(requires_grad, examples)]
        try:
            self.variants = [v for fn in (search_fn, *self.spellings) for e in examples for v in self._traced(fn, e)]
        except TraceError as error:
            raise RegistrationError(f"pattern {name!r}: {error}") from error
        targets = {t for whole in self.variants for v in whole.with_fewer_gradients for t in v.matcher.targets}
        if self.accepted.dtypes is not None:
            targets.add(torch.ops.prims.convert_element_type.default)  # in which a search function of fewer bits ends
        if any(v.search.wordings for v in self.variants):
            targets |= {t for end in wordings.ENDS for t in equivalent_targets(end)}
        self.anchors = tuple(sorted(targets, key=str))
        self.left_out: dict[torch.dtype, str] = {}
        self._specialized: dict[tuple[Variant, Form], Variant | str] = {}
        self._worded: dict[tuple[Variant, int], Variant | None] = {}
        self._lock = threading.RLock()

    def _traced(self, search_fn: Callable, example: dict[str, Any]) -> Iterator[Variant]:
        yield (first := self._variant(search_fn, example))
        tensors = [n for n, v in example.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"]
        if tensors and devices.available("cuda"):
            # Some operators come to other graphs on a GPU: the norms, for example, have a backward of their own there.
            there = {**example, **{n: example[n].detach().cuda().requires_grad_(example[n].requires_grad) for n in tensors}}
            second = self._variant(search_fn, there)
            if _code(second) != _code(first):
                yield second

    def _in_words_of(self, graph: fx.Graph) -> list[Variant]:
        """The traces of the examples that may be in a graph: in the search function's own words, and in others that the graph tells of."""
        with self._lock:
            for variant in self.variants:
                for wording, signs in enumerate(variant.search.wordings, 1):
                    if (
                        (variant, wording) in self._worded
                        or not wordings.tells_of(graph, signs)
                        or (variant.training and not g.is_joint(graph))
                    ):
                        continue
                    self._worded[variant, wording] = self._in_other_words(variant, wording)
            return [*self.variants, *(v for v in self._worded.values() if v is not None)]

    def _in_other_words(self, variant: Variant, wording: int) -> Variant | None:
        try:
            with outside_of_compiles():
                return variant.in_other_words(wording)
        except (RegistrationError, TraceError, RuntimeError) as error:
            log.debug("pattern %r: wording %d of its search function is left out: %s", self.name, wording, error)
            return None

    def _variant(self, search_fn: Callable, example: dict[str, Any]) -> Variant:
        settings = dict(exact=self.roundings == "exact", derive_backward=self.derive_backward)
        return Variant(self.name, search_fn, self.replace_fn, example, self.level, self.pin, **settings)

    def match(self, node: fx.Node) -> Match | Reject | None:
        rejected = None
        own = self._in_words_of(node.graph)
        with self._lock:
            variants = [*own, *(v for v in self._specialized.values() if isinstance(v, Variant))]
        # A forward alone may also be where forward and backward are: they are looked for first.
        variants.sort(key=lambda v: not v.training)
        for variant in (v for whole in variants for v in whole.with_fewer_gradients):
            if node.target in variant.matcher.targets:
                answer = self._match(variant, node)
                if isinstance(answer, Match):
                    return answer
                rejected = _telling(rejected, answer)
        for answer in self._match_specialized(own, node) if self.accepted.several else ():
            if isinstance(answer, Match):
                return answer
            rejected = _telling(answer, rejected)  # it is about a form that the graph holds
        return rejected

    def _match(self, variant: Variant, node: fx.Node) -> Match | Reject | None:
        answer = variant.match(node, self.when)
        if isinstance(answer, Match):
            return self._used_by_backward(answer) or self._why_not_on(variant, g.value(node).device.type) or answer
        return answer

    def _used_by_backward(self, match: Match) -> Reject | None:
        """Refuses a forward whose backward reads what is inside, where the pattern was registered for inference alone."""
        if self.level != "joint" or any(v.training for v in self.variants) or not g.is_joint(match.outputs[0].graph):
            return None
        inside = {*match.nodes}
        node = next((n for n in match.interior if any(u not in inside for u in n.users)), None)
        if node is None:
            return None
        cure = "example_inputs that require grad match forward and backward together"
        return Reject(f"a backward reads {g.describe(node)} inside the match; {cure}", node, "illegal")

    def nearest(self, node: fx.Node) -> tuple[float, Reject] | None:
        found = [v.matcher.nearest(node) for v in self.variants if node.target in v.matcher.targets]
        return max((f for f in found if f is not None), key=lambda f: f[0], default=None)

    def _match_specialized(self, variants: Sequence[Variant], node: fx.Node) -> Iterator[Match | Reject | None]:
        """Looks for the pattern in other dtypes and ranks, and traces it in those that it is found in."""
        for variant in variants:
            forms = dict.fromkeys(f for v in variant.with_fewer_gradients for f in v.other_forms(node))
            if node.users and all(map(is_cast, node.users)):
                # Where it is of fewer bits it ends in the cast, and is found there.
                fewest = min((sum(d.itemsize for _, d in f.dtypes) for f in forms), default=0)
                forms = {f: None for f in forms if sum(d.itemsize for _, d in f.dtypes) == fewest}
            for form in forms:
                with self._lock:
                    if (variant, form) not in self._specialized:
                        self._specialized[variant, form] = self._specialize(variant, form)
                    found = self._specialized[variant, form]
                if isinstance(found, Variant):
                    yield from (self._match(v, node) for v in found.with_fewer_gradients if node.target in v.matcher.targets)
                elif found:
                    yield Reject(found)

    def _specialize(self, variant: Variant, form: Form) -> Variant | str:
        """The trace for ``form``; or why there is none, which is empty where the pattern is not there in any form."""
        reason = why_not(form, variant.example, self.accepted)
        left_out = next((f"not for {d}: {self.left_out[d]}" for _, d in form.dtypes if d in self.left_out), None)
        if reason is not None or left_out is not None:
            return f"wrong dtype: {left_out}" if reason is None else reason
        try:
            log.debug("pattern %r is traced for %s", self.name, form)
            with outside_of_compiles():
                found = self._variant(variant.search_fn, example_of(form, variant.example))
                return found.in_other_words(variant.wording) if variant.wording else found
        except (RegistrationError, TraceError, RuntimeError) as error:
            return f"the pattern can't be traced for {form}: {error}"

    def runs_on(self, variant: Variant, device: str) -> bool:
        """Whether every operator of the replacement has a kernel for a type of device."""
        return device in self.on if self.on is not None else devices.lacking(variant.replace.graph, device) is None

    def _why_not_on(self, variant: Variant, device: str) -> Reject | None:
        """Why the replacement may not be used on a type of device. It is verified there the first time that it is asked for."""
        if not self.runs_on(variant, device):
            lacking = devices.lacking(variant.replace.graph, device)
            if self.on is not None or lacking is None:
                return Reject(f"registered for {devices.spelled(self.on or ())}, not for {device}", code="no_kernel")
            return Reject(
                f"{lacking} has kernels for {devices.spelled(devices.devices_of(lacking) or ())}, not for {device}", code="no_kernel"
            )
        if not self.verifies:
            return None
        with self._lock:
            if device not in variant.verified:
                log.info("pattern %r is verified on %s for %s", self.name, device, Form.of_example(variant.example))
                variant.verified[device] = why_wrong(verify_variant(variant, device, brief=self._compared_elsewhere(variant, device)))
            reason = variant.verified[device]
        return None if reason is None else Reject(f"verification failed: {reason}", code="illegal")

    def _compared_elsewhere(self, variant: Variant, device: str) -> bool:
        """Whether another form of the same search function was compared on all inputs on a type of device."""
        return any(v is not variant and device in v.verified and v.search_fn is variant.search_fn for v in self.variants)

    def fingerprint(self) -> str:
        functions = [("its search function", self.search_fn), ("its replacement", self.replace_fn), ("its check", self.when)]
        functions += [("one of its spellings", s) for s in self.spellings]
        for what, function in functions:
            check_readable(function, what)
        # The traces say what the functions do. What they will do for other dtypes and ranks only the functions say.
        several = [cache_keys.function(f, f"pattern {self.name!r}: {what}") for what, f in functions] if self.accepted.several else []
        settings = repr((self.accepted, self.roundings, sorted(self.on) if self.on is not None else None, self.verifies))

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

        variants = [*map(parts, self.variants), [settings, *several]]
        return cache_keys.traced_pattern(self.name, self.level, self.priority, self._identity_of_check(), variants)

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
        searched = self._arguments_of("the search function", self.search_fn)
        others = [("the replacement", self.replace_fn), *(("a spelling", s) for s in self.spellings)]
        for what, function in others:
            taken = self._arguments_of(what, function)
            if taken != searched:
                takes = f"the search function takes ({', '.join(searched)}), {what} ({', '.join(taken)})"
                raise RegistrationError(f"pattern {self.name!r}: {takes}")
        for argument, names in (("pin", self.pin), ("optional", self.optional)):
            unknown = [p for p in names if p not in searched]
            if unknown:
                known = f"the arguments are {', '.join(searched)}"
                raise RegistrationError(f"pattern {self.name!r}: {argument} names {unknown[0]!r}; {known}")
        if self.roundings not in ("fewer", "exact"):
            raise RegistrationError(f"pattern {self.name!r}: roundings={self.roundings!r}; 'fewer' or 'exact' is accepted")
        self._identity_of_check()

    def _check_pinned(self, examples: Sequence[dict[str, Any]]) -> None:
        tensor = next((n for n in self.pin for e in examples if isinstance(e.get(n), torch.Tensor)), None)
        if tensor is not None:
            raise RegistrationError(f"pattern {self.name!r}: pin names {tensor!r}, a tensor; numbers can be pinned")

    def _arguments_of(self, what: str, function: Callable) -> list[str]:
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            cure = "write a function or a lambda that calls it"
            raise RegistrationError(f"pattern {self.name!r}: {what} is built in, and its arguments can't be told; {cure}") from None
        unnamed = next((p for p in parameters.values() if p.kind is not p.POSITIONAL_OR_KEYWORD and p.default is p.empty), None)
        if unnamed is not None:
            raise RegistrationError(
                f"pattern {self.name!r}: {what} takes {unnamed}, {unnamed.kind.description}; arguments are given by position or by name"
            )
        return list(parameters)

    def _identity_of_check(self) -> str:
        try:
            return cache_keys.function(self.when, f"pattern {self.name!r}: when")
        except UnidentifiableError as error:
            raise RegistrationError(str(error)) from None


def _code(variant: Variant) -> str:
    return variant.search.graph.python_code("self").src + variant.replace.graph.python_code("self").src


def _telling(first: Reject | None, second: Reject | None) -> Reject | None:
    """Of two reasons the one that says more: that a whole match was refused, or else the first."""
    if first is None or (second is not None and first.code == "unsupported" and second.code != "unsupported"):
        return second
    return first


def _names(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
