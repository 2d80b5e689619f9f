"""Patterns given as ordinary PyTorch: ``@register_pattern`` and ``register_replacement``.

    @fusebackend.register_pattern("silu_mul", example_inputs=(torch.randn(4, 8), torch.randn(4, 8)))
    def silu_mul(x, y):
        return torch.nn.functional.silu(x) * y

    @silu_mul.replace_with
    def _(x, y):
        return torch.ops.mylib.silu_mul(x, y)

Both functions are traced with symbolic sizes (:mod:`fusebackend.declarative.trace`), once for each example, and compared before
the pattern is registered (:mod:`fusebackend.declarative.verify`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch import fx

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.declarative.subgraph_matcher import Found, Search
from fusebackend.declarative.trace import Trace, TraceError, trace
from fusebackend.declarative.verify import verify_traced
from fusebackend.native.user_kernels import library_key
from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Emitter, Level, Match, Pattern, Reject


class RegistrationError(ValueError):
    """A pattern can't be registered; the message says what was given and what is accepted."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What ``when`` / ``extra_check`` is shown: a match that is otherwise complete.

    Attributes:
        kwargs: for each argument of the search function its fake tensor, or the number that it stands for.
        nodes: for each tensor argument its node in the graph.
        output_node: the node that the pattern ends in.
    """

    kwargs: Mapping[str, Any]
    nodes: Mapping[str, fx.Node]
    output_node: fx.Node


class _Variant:
    """One example's traces of the search function and of its replacement."""

    def __init__(self, pattern: TracedPattern, example: Mapping[str, Any]):
        self.example = dict(example)
        self.tensors = [n for n, v in example.items() if isinstance(v, torch.Tensor)]
        wild = [n for n, v in example.items() if _is_scalar(v) and n not in pattern.pin]
        stand_ins = {n: _stand_in(i, type(example[n])) for i, n in enumerate(wild)}
        self.scalars = {v: n for n, v in stand_ins.items()}
        self.search = self._trace(pattern.search_fn, {**example, **stand_ins}, pattern.level)
        self.replace = self._trace(pattern.replace_fn, {**example, **stand_ins}, pattern.level)
        self._check_scalars(pattern)
        self._check_outputs(pattern)
        self.finder = Search(self.search, self.scalars)

    def _trace(self, fn: Callable, arguments: Mapping[str, Any], level: Level) -> Trace:
        def positional(*tensors: torch.Tensor) -> Any:
            return fn(**{**arguments, **dict(zip(self.tensors, tensors))})

        positional.__name__ = getattr(fn, "__name__", "function")
        return trace(positional, [arguments[n] for n in self.tensors], level)

    def _check_scalars(self, pattern: TracedPattern) -> None:
        found = {a for n in self.search.graph.nodes for a in torch.utils._pytree.tree_leaves((n.args, n.kwargs)) if _is_scalar(a)}
        for value, name in self.scalars.items():
            if value not in found:
                raise RegistrationError(
                    f"pattern {pattern.name!r}: the number {name!r} does not stand as it is in what the search function computes "
                    f"(it is derived from, or decides a shape); pin it: pin=({name!r},) makes {self.example[name]!r} part of the pattern"
                )

    def _check_outputs(self, pattern: TracedPattern) -> None:
        old, new = self.search.outputs, self.replace.outputs
        if self.search.forward_outputs != self.replace.forward_outputs:
            raise RegistrationError(
                f"pattern {pattern.name!r}: the search function returns {self.search.forward_outputs} tensors, "
                f"the replacement {self.replace.forward_outputs}"
            )
        unused = [n for n, p in zip(self.tensors, self.search.inputs) if p is None]
        if unused:
            raise RegistrationError(f"pattern {pattern.name!r}: the search function does not use its argument {unused[0]!r}")
        mine = _size_names(self.search, self.tensors)
        theirs = self._names_in_replacement(mine)
        names = [f"output {i}" for i in range(self.search.forward_outputs)] + [f"gradient of {n}" for n in self.tensors]
        for what, a, b in zip(names, old, new):
            if (a is None) != (b is None):
                whose = "replacement" if b is None else "search function"
                raise RegistrationError(f"pattern {pattern.name!r}: the {whose} gives no {what}")
            if a is not None and b is not None and _describe(a, mine) != _describe(b, theirs):
                raise RegistrationError(
                    f"pattern {pattern.name!r}: {what} differs: the search function gives {_describe(a, mine)}, "
                    f"the replacement {_describe(b, theirs)}"
                )

    def _names_in_replacement(self, names: Mapping[Any, Any]) -> dict[Any, Any]:
        """The search function may need sizes to be equal that the replacement does not ask about: its word counts."""
        found: dict[Any, Any] = {}
        for searched, p in zip(self.search.inputs, self.replace.inputs):
            if p is None or searched is None:
                continue
            for d, size in _symbolic(g.value(p).shape):
                same = g.value(searched).shape[d]
                found.setdefault(size.node.expr, same.node.expr.xreplace(dict(names)) if isinstance(same, torch.SymInt) else same)
        return found

    def match(self, node: fx.Node, when: Callable | None) -> Match | Reject | None:
        found = self.finder.find(node)
        if not isinstance(found, Found):
            return found
        state = found.state
        images = {p: n for p, (n, _) in state.nodes.items()}
        outputs = tuple(dict.fromkeys(images[o] for o in self.finder.outputs))
        if when is not None:
            bound = {n: state.inputs[p] for n, p in zip(self.tensors, self.search.inputs) if p is not None}
            kwargs = {**self.example, **{n: g.value(b.node) for n, b in bound.items()}, **state.scalars}
            verdict = when(Candidate(kwargs, {n: b.node for n, b in bound.items()}, node))
            if verdict is not True:
                if isinstance(verdict, Reject):
                    return verdict
                return Reject(verdict if isinstance(verdict, str) else "the pattern's own check said no")
        seen_through = {v for _, views in state.nodes.values() for v in views}
        interior = tuple(sorted({*images.values(), *state.sums, *self._free(seen_through, images)} - set(outputs)))
        return Match(outputs, lambda e: self._emit(e, found), interior)

    @staticmethod
    def _free(views: set[fx.Node], images: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        """The views that were seen through and that nobody else needs."""
        inside = {*views, *images.values()}
        return {v for v in views if all(u in inside for u in v.users)}

    def _emit(self, e: Emitter, found: Found) -> tuple[fx.Node, ...]:
        state = found.state
        values: dict[fx.Node, Any] = {}
        pairs = [*zip(self.replace.inputs, self.search.inputs), *zip(self.replace.tangents, self.search.tangents)]
        for mine, searched in pairs:
            if mine is not None:
                assert searched is not None
                bound = state.inputs[searched]
                node = bound.node
                for view in bound.views:
                    node = e.call(cast(Callable, view.target), node, *view.args[1:], **view.kwargs)
                values[mine] = node
        dims = [(p, d, s.node.expr) for p in self.replace.inputs if p is not None for d, s in _symbolic(g.value(p).shape)]
        env = {symbol: _actual(values[p], d) for p, d, symbol in dims if symbol.is_symbol}
        found = Found(state, env)

        def resolve(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if argument in values:
                    return values[argument]
                size = found.size(g.value(argument))
                if isinstance(size, int):
                    return size
                p, d = next((p, d) for p, d, symbol in dims if symbol == g.value(argument).node.expr)
                return e.call(torch.ops.aten.sym_size.int, values[p], d)
            if _is_scalar(argument) and argument in self.scalars:
                return state.scalars[self.scalars[argument]]
            return argument

        for node in self.replace.graph.nodes:
            if node.op != "call_function":
                continue
            if not g.is_tensor(node) and isinstance(g.value(node), (int, torch.SymInt)) and isinstance(found.size(g.value(node)), int):
                values[node] = found.size(g.value(node))
                continue
            args, kwargs = torch.utils._pytree.tree_map(resolve, (node.args, node.kwargs))
            values[node] = e.call(node.target, *args, **kwargs)
        given = {old: values[new] for old, new in zip(self.search.outputs, self.replace.outputs) if old and new}
        for term in state.rest:
            given[self.finder.anchor] = e.call(torch.ops.aten.add.Tensor, term, given[self.finder.anchor])
        images = {o: state.nodes[o][0] for o in self.finder.outputs}
        unique = dict.fromkeys(images.values())
        return tuple(given[next(o for o in self.finder.outputs if images[o] is image)] for image in unique)


class TracedPattern(Pattern):
    """A pattern whose search function and replacement are ordinary functions. Made by the functions below."""

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
        self.example_arguments = [self._named(e) for e in _examples(name, example_inputs)]
        self._check_names()
        try:
            self.variants = [_Variant(self, _without_grad(e)) for e in self.example_arguments]
            # Training graphs hold forward and backward: a trace of its own for each example that asks for gradients.
            self.variants += [_Variant(self, e) for e in self.example_arguments if _wants_grad(e)]
        except TraceError as error:
            raise RegistrationError(f"pattern {name!r}: {error}") from error
        self.anchors = tuple(dict.fromkeys(cast(torch._ops.OpOverload, v.finder.anchor.target) for v in self.variants))

    def match(self, node: fx.Node) -> Match | Reject | None:
        rejected = None
        for variant in self.variants:
            if variant.finder.anchor.target is node.target:
                answer = variant.match(node, self.when)
                if isinstance(answer, Match):
                    return answer
                rejected = rejected or answer
        return rejected

    def fingerprint(self) -> str:
        def parts(v: _Variant) -> Iterator[str]:
            yield v.search.graph.python_code("self").src
            yield v.replace.graph.python_code("self").src
            yield repr(sorted(v.scalars.items()))
            names = _size_names(v.search, v.tensors)
            yield from (f"{n.name} {_describe(n, names)}" for n in v.search.inputs if n is not None)
            yield from (library_key(n.target) for n in v.replace.graph.nodes if isinstance(n.target, torch._ops.OpOverload))

        check = _identity(self.when, f"pattern {self.name!r}: when")
        return cache_keys.traced_pattern(self.name, self.level, self.priority, check, map(parts, self.variants))

    def _named(self, example: Sequence[Any]) -> dict[str, Any]:
        try:
            return dict(inspect.signature(self.search_fn).bind(*example).arguments)
        except TypeError as error:
            raise RegistrationError(f"pattern {self.name!r}: the example inputs do not fit the search function: {error}") from error

    def _check_names(self) -> None:
        mine, theirs = (list(inspect.signature(f).parameters) for f in (self.search_fn, self.replace_fn))
        if mine != theirs:
            takes = f"the search function takes ({', '.join(mine)}), the replacement ({', '.join(theirs)})"
            raise RegistrationError(f"pattern {self.name!r}: {takes}")
        unknown = [p for p in self.pin if p not in mine]
        if unknown:
            raise RegistrationError(f"pattern {self.name!r}: pin names {unknown[0]!r}; the arguments are {', '.join(mine)}")
        _identity(self.when, f"pattern {self.name!r}: when")


class SearchFunction:
    """What ``@register_pattern`` makes of a search function: still callable, and waiting for its replacement."""

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
    """Decorates a search function; then decorate its replacement with ``.replace_with``.

    Args:
        name: how options and reports call the pattern.
        example_inputs: arguments for the search function, or a list of several such tuples: one trace each, for other
            ranks or dtypes. Sizes are symbolic, but for 0 and 1, which are taken as fixed. If a tensor requires grad, the
            pattern is looked for in training graphs too, forward and backward together, and the replacement must be
            differentiable.
        when: shown a :class:`Candidate`, says True, or why not (False, a sentence, or a Reject).
        level: ``"joint"`` (default), or ``"post_grad"``, after the forward and backward graphs were parted.
        priority: of two matches that overlap the higher wins, then the larger.
        pin: names of number arguments whose example value is part of the pattern. Other numbers stand for any number.
        verify: compare search function and replacement before registering (see :func:`fusebackend.declarative.verify`).

    Raises:
        RegistrationError: name taken, functions that do not fit together, a function that can't be traced.
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
    """Registers a pattern in one call, with the argument names of Inductor's function; see :func:`register_pattern`."""
    name = name or search_fn.__name__
    if name in registry.known_names():
        taken = ", ".join(registry.known_names())
        raise RegistrationError(f"pattern name {name!r} is taken; fusebackend.unregister({name!r}) frees it. Taken: {taken}")
    pattern = TracedPattern(name, search_fn, replace_fn, example_inputs, when=extra_check, level=level, priority=priority, pin=pin)
    if verify:
        verify_traced(pattern).raise_if_wrong()
    registry.register(pattern)
    return pattern


def _examples(name: str, given: Sequence[Any]) -> list[tuple]:
    several = isinstance(given, list) and given and all(isinstance(e, (tuple, list)) for e in given)
    examples = [tuple(e) for e in given] if several else [tuple(given)]
    for example in examples:
        if not any(isinstance(v, torch.Tensor) for v in example):
            raise RegistrationError(f"pattern {name!r}: example_inputs must hold a tensor, got {example!r}")
    return examples


def _wants_grad(example: Mapping[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in example.values())


def _without_grad(example: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in example.items()}


def _stand_in(index: int, kind: type) -> int | float:
    """A number that nobody writes by hand: where it turns up in a trace, its argument is meant."""
    return 0.5317 + 1e-9 * (7919 * index + 1) if kind is float else 7368787 + 104729 * index


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _symbolic(shape: Sequence[Any]) -> list[tuple[int, torch.SymInt]]:
    return [(d, s) for d, s in enumerate(shape) if isinstance(s, torch.SymInt)]


def _actual(node: fx.Node, dim: int) -> Any:
    return g.value(node).shape[dim]


def _size_names(trace: Trace, names: Sequence[str]) -> dict[Any, Any]:
    """A name for each symbol of a trace that does not depend on the trace: the first argument's dim that has it."""
    found: dict[Any, Any] = {}
    for name, p in zip(names, trace.inputs):
        for d, size in _symbolic(g.value(p).shape) if p is not None else []:
            found.setdefault(size.node.expr, sympy.Symbol(f"{name}.size({d})", integer=True, positive=True))
    return found


def _describe(node: fx.Node, names: Mapping[Any, Any]) -> str:
    """Dtype, shape and strides in words, sizes by ``names``."""

    def spell(size: Any) -> str:
        return str(size.node.expr.xreplace(dict(names)) if isinstance(size, torch.SymInt) else size)

    value = g.value(node)
    if not isinstance(value, torch.Tensor):
        return str(value)
    shape, strides = (f"({', '.join(map(spell, sizes))})" for sizes in (value.shape, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')} of shape {shape} and strides {strides}"


def _identity(check: Callable | None, where: str) -> str:
    try:
        return cache_keys.function(check, where)
    except cache_keys.UnidentifiableError as error:
        raise RegistrationError(str(error)) from None
