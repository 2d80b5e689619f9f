"""One example of a traced pattern: the traces of its two functions, what they match, and what replaces it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves, tree_map

from fusebackend import fx_utils as g
from fusebackend.declarative import sizes
from fusebackend.declarative.errors import RegistrationError
from fusebackend.declarative.examples import is_number, stand_in
from fusebackend.declarative.partial_match import SubgraphMatch
from fusebackend.declarative.precision import in_single
from fusebackend.declarative.specialization import Form
from fusebackend.declarative.subgraph_matcher import Loose, SubgraphMatcher
from fusebackend.declarative.trace import Trace, TraceError, same_but_for_numbers, trace
from fusebackend.rewriting.pattern import Emitter, Level, Match, Reject


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A match that is complete but for the user's own check, which receives it (``when``, ``extra_check``).

    Attributes:
        kwargs: for each argument of the search function its fake tensor, or the number that it stands for.
        nodes: for each tensor argument its node in the graph.
        output_node: the node that the pattern ends in.
    """

    kwargs: Mapping[str, Any]
    nodes: Mapping[str, fx.Node]
    output_node: fx.Node


class Variant:
    """The traces of a search function and its replacement for one example.

    Args:
        pattern: the pattern's name, for the messages of errors.
        search_fn, replace_fn: the two functions.
        example: the arguments that they are traced with, by name.
        level: the graphs that the pattern is looked for in.
        pin: the number arguments whose example value is part of the pattern.
        exact: whether a graph may not round between the operators where the pattern does not.
        derive_backward: whether the gradients are those of the search function, computed from its arguments.

    Attributes:
        derived: whether the gradients of this variant are derived.
        wording: which wording of the search function was traced; 0 is its own.

    Raises:
        RegistrationError: the two functions do not fit together.
        TraceError: a function can't be traced.
    """

    def __init__(
        self,
        pattern: str,
        search_fn: Callable,
        replace_fn: Callable,
        example: Mapping[str, Any],
        level: Level,
        pin: Sequence[str],
        exact: bool = False,
        derive_backward: bool = False,
    ):
        self.search_fn, self.replace_fn = search_fn, replace_fn
        self.example, self.wording = dict(example), 0
        self.tensors = [n for n, v in example.items() if isinstance(v, torch.Tensor)]
        numbers = [n for n, v in example.items() if is_number(v) and n not in pin]
        stand_ins = {n: stand_in(i, type(example[n])) for i, n in enumerate(numbers)}
        # A number that the program gives to an operator of single precision may stand in the trace as that rounds it.
        self.scalars = {v: n for n, given in stand_ins.items() for v in dict.fromkeys((given, in_single(given)))}
        self._pattern, self._level, self._traced_with = pattern, level, {**example, **stand_ins}
        self.search = self._trace(search_fn)
        self.derived = derive_backward and bool(self.search.tangents)
        self.replace = (self._derived if self.derived else self._trace)(replace_fn)
        self._check_scalars(pattern)
        self._check_numbers_of_replacement(pattern)
        self._check_inputs(pattern)
        self._check_outputs(pattern)
        drawn = next((n for n in self.replace.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())), None)
        if drawn is not None:
            raise RegistrationError(f"pattern {pattern!r}: the replacement draws random numbers ({g.describe(drawn)})")
        for what, traced in (("search function", self.search), ("replacement", self.replace)):
            if traced.graph.find_nodes(op="get_attr"):
                made = f"the {what} holds a tensor that is made of a number (torch.tensor): torch.full makes one in the graph"
                raise RegistrationError(f"pattern {pattern!r}: {made}")
        self._exact = exact
        # What verification has found on each type of device: why the replacement may not be used there, or None.
        self.verified: dict[str, str | None] = {}
        self._make_all_matchers()

    def in_other_words(self, wording: int) -> Variant:
        """The same replacement for another wording of the search function, which needs no verification of its own.

        Raises:
            RegistrationError, TraceError: that wording gives something else.
        """
        other = copy.copy(self)
        other.wording, other.search = wording, self._trace(self.search_fn, wording=wording)
        other._check_scalars(self._pattern)
        other._check_outputs(self._pattern)
        other._make_all_matchers()
        return other

    def _make_all_matchers(self) -> None:
        self._make_matchers()
        #: This variant, and it without some of the gradients, for programs that do not ask for all.
        self.with_fewer_gradients = [self, *map(self._without, _proper_subsets(self._gradients()))]

    def _make_matchers(self) -> None:
        self.matcher = SubgraphMatcher(self.search, self.scalars, exact=self._exact)
        loose: tuple[Loose, ...] = ("sources", "casts")
        self._loose = [SubgraphMatcher(self.search, self.scalars, loose=how) for how in loose]

    def _gradients(self) -> list[int]:
        """The positions of the arguments whose gradients the search function computes."""
        outputs = self.search.outputs[self.search.forward_outputs :]
        return [i for i, o in enumerate(outputs) if o is not None and o.op != "placeholder"]

    def _without(self, gradients: tuple[int, ...]) -> Variant:
        fewer = copy.copy(self)
        fewer.search, fewer.replace = self.search.without_gradients(gradients), self.replace.without_gradients(gradients)
        fewer._make_matchers()
        return fewer

    @property
    def training(self) -> bool:
        return bool(self.search.tangents)

    def other_forms(self, node: fx.Node) -> list[Form]:
        """The dtypes and ranks with which the search function may be at ``node``, where they are not those of this variant."""
        found = [m.find(node) for m in self._loose] if node.target in self.matcher.targets else []
        forms = [Form.of_match(self, f) for f in found if isinstance(f, SubgraphMatch)]
        return [f for f in dict.fromkeys(forms) if len(f.dtypes) == len(self.tensors) and f != Form.of_example(self.example)]

    def _trace(self, fn: Callable, wording: int = 0) -> Trace:
        def positional(*tensors: torch.Tensor) -> Any:
            return fn(**{**self._traced_with, **dict(zip(self.tensors, tensors))})

        positional.__name__ = getattr(fn, "__name__", "function")
        return trace(positional, [self._traced_with[n] for n in self.tensors], self._level, wording)

    def _derived(self, fn: Callable) -> Trace:
        """The trace of ``fn`` with the search function's gradients: of both functions, with the results of the one taken from it."""

        def both(**given: Any) -> list[Any]:
            detached = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
            return [*tree_leaves(self.search_fn(**given)), *tree_leaves(fn(**detached))]

        both.__name__ = getattr(fn, "__name__", "function")
        found = self._trace(both)
        count = self.search.forward_outputs
        return found.without_outputs(range(count))

    def _check_scalars(self, pattern: str) -> None:
        found = {a for n in self.search.graph.nodes for a in tree_leaves((n.args, n.kwargs)) if is_number(a)}
        for name in dict.fromkeys(self.scalars.values()):
            if not any(value in found for value, of in self.scalars.items() if of == name):
                raise RegistrationError(
                    f"pattern {pattern!r}: the number {name!r} is not an argument of any operator in the search function's graph "
                    f"(another number is derived from it, or it decides a shape); pin it: pin=({name!r},) makes {self.example[name]!r} "
                    "part of the pattern"
                )

    def _check_numbers_of_replacement(self, pattern: str) -> None:
        """Its trace must hold for all numbers: none is computed from a number argument, nor decides one what is called."""
        numbers = list(dict.fromkeys(self.scalars.values()))
        if not numbers:
            return
        # Not every function takes a negative number.
        found = [same for sign in (-1, 1) if (same := self._replaces_alike_with(numbers, sign)) is not None]
        if not found or not all(found):
            which = " or ".join(map(repr, numbers))
            raise RegistrationError(
                f"pattern {pattern!r}: the replacement computes with {which} before it gives that to an operator, or decides by it what "
                f"it calls; a trace holds one such number. Compute with it inside of an operator, or pin it: pin=({numbers[0]!r},) makes "
                f"{self.example[numbers[0]]!r} part of the pattern"
            )

    def _replaces_alike_with(self, numbers: Sequence[str], sign: int) -> bool | None:
        """Whether other numbers of that sign give the same trace of the replacement but for themselves; None if they give none."""
        others = {n: sign * stand_in(i, type(self.example[n]), other=True) for i, n in enumerate(numbers)}
        known = {v: n for n, given in others.items() for v in dict.fromkeys((given, in_single(given)))}
        other = copy.copy(self)
        other._traced_with = {**self._traced_with, **others}
        try:
            again = (other._derived if self.derived else other._trace)(self.replace_fn)
        except TraceError:
            return None
        return same_but_for_numbers(self.replace, self.scalars, again, known)

    def _check_inputs(self, pattern: str) -> None:
        unused = [n for n, p in zip(self.tensors, self.search.inputs) if p is None]
        if unused:
            raise RegistrationError(f"pattern {pattern!r}: the search function does not use its argument {unused[0]!r}")

    def _check_outputs(self, pattern: str) -> None:
        if self.search.forward_outputs != self.replace.forward_outputs:
            raise RegistrationError(
                f"pattern {pattern!r}: the search function returns {self.search.forward_outputs} tensors, "
                f"the replacement {self.replace.forward_outputs}"
            )
        search_names = sizes.argument_names(self.search, self.tensors)
        replace_names = self._names_in_replacement(search_names)
        outputs = [f"output {i}" for i in range(self.search.forward_outputs)] + [f"gradient of {n}" for n in self.tensors]
        for what, searched, replaced in zip(outputs, self.search.outputs, self.replace.outputs):
            if searched is None and replaced is None:
                continue
            if searched is None or replaced is None:
                function = "replacement" if replaced is None else "search function"
                cure = "; give its operator a backward, or let derive_backward=True take the search function's" if replaced is None else ""
                raise RegistrationError(f"pattern {pattern!r}: the {function} gives no {what}{cure if 'gradient' in what else ''}")
            expected, got = sizes.describe(searched, search_names), sizes.describe(replaced, replace_names)
            if expected != got:
                raise RegistrationError(f"pattern {pattern!r}: {what} differs: the search function gives {expected}, the replacement {got}")
        pairs = zip(outputs, self.search.outputs, self.replace.outputs)
        computed = [(what, s, r) for what, s, r in pairs if s is not None and r is not None and s.op != "placeholder"]
        if not computed:
            raise RegistrationError(
                f"pattern {pattern!r}: the search function returns its arguments as they are: there is nothing to replace"
            )
        self._check_shared_memory(pattern, computed)

    def _check_shared_memory(self, pattern: str, outputs: Sequence[tuple[str, fx.Node, fx.Node]]) -> None:
        """What the replacement returns shares memory with what the search function's results do, and with nothing else: a program that
        writes to the one would otherwise change the other, or no longer do so."""
        arguments = [*zip(self.tensors, self.search.inputs, self.replace.inputs)]
        arguments += zip(("a gradient that it is given",) * len(self.search.tangents), self.search.tangents, self.replace.tangents)
        for i, (what, searched, replaced) in enumerate(outputs):
            for other, old, new in [*arguments, *outputs[:i]]:
                before = old is not None and g.share_storage(g.value(old), g.value(searched))
                after = new is not None and g.share_storage(g.value(new), g.value(replaced))
                if before != after:
                    one, another = ("replacement", "search function") if after else ("search function", "replacement")
                    raise RegistrationError(
                        f"pattern {pattern!r}: in the {one} {what} shares memory with {other}, in the {another} it does not; "
                        "return a view where the search function does, and a new tensor (a clone) where it does not"
                    )

    def _names_in_replacement(self, names: Mapping[Any, Any]) -> dict[Any, Any]:
        """Names for the replacement's sizes, taken from the search function's ``names`` of the same arguments.

        The search function may require sizes to be equal that are independent in the replacement; they get one name.
        """
        found: dict[Any, Any] = {}
        for searched, replaced in zip(self.search.inputs, self.replace.inputs):
            if searched is None or replaced is None:
                continue
            for d, size in sizes.symbolic(g.value(replaced).shape):
                same = g.value(searched).shape[d]
                found.setdefault(size.node.expr, same.node.expr.xreplace(dict(names)) if isinstance(same, torch.SymInt) else same)
        return found

    def match(self, node: fx.Node, when: Callable[[Candidate], bool | str | Reject] | None) -> Match | Reject | None:
        """Matches the search function with its anchor at ``node``."""
        found = self.matcher.find(node)
        if not isinstance(found, SubgraphMatch):
            return found
        if when is not None:
            bound = {n: found.inputs[p] for n, p in zip(self.tensors, self.search.inputs) if p is not None}
            kwargs = {**self.example, **{n: g.value(b.views[-1] if b.views else b.node) for n, b in bound.items()}, **found.scalars}
            answer = when(Candidate(kwargs, {n: b.node for n, b in bound.items()}, node))
            if isinstance(answer, Reject):
                return answer
            if answer is not True:
                return Reject(_reason_of(answer))
        other = self._other_sizes(found)
        if other is not None:
            return Reject(other, node)
        outputs = tuple(dict.fromkeys(found.nodes[o] for o in self.matcher.outputs))
        read = {b.node for b in found.inputs.values()}  # a cast in the pattern may stand for an argument that needs none
        interior = {*found.nodes.values(), *found.sums, *_used_inside_only(found)} - set(outputs) - read
        return Match(outputs, lambda e: self._emit(e, found), tuple(sorted(interior)), found.note)

    def _other_sizes(self, found: SubgraphMatch) -> str | None:
        """Why a function would do something else with the sizes of the match than with those that it was traced for; None if not."""
        shapes = [found.inputs[p].shape if p is not None else None for p in self.search.inputs]
        for placeholder, shape in zip(self.replace.inputs, shapes):
            for traced, size in zip(g.value(placeholder).shape, shape) if placeholder is not None and shape is not None else ():
                if isinstance(traced, int) and not g.same_size(traced, size):
                    return f"the replacement decides by a size, and its trace holds for {traced}; here it is {size}"
        for what, traced_one in (("search function", self.search), ("replacement", self.replace)):
            condition = sizes.unmet(traced_one, shapes)
            if condition is not None:
                named = condition.xreplace(sizes.argument_names(traced_one, self.tensors))
                return f"the {what} decides by sizes, and its trace holds where {named}, which is not known here"
        return None

    def _emit(self, e: Emitter, found: SubgraphMatch) -> tuple[fx.Node, ...]:
        """Emits the replacement's nodes. Returns a node for each output of the match."""
        values: dict[fx.Node, Any] = {}
        pairs = [*zip(self.replace.inputs, self.search.inputs), *zip(self.replace.tangents, self.search.tangents)]
        for replaced, searched in pairs:
            if replaced is not None:
                assert searched is not None
                bound = found.inputs[searched]
                node = bound.node
                for view in bound.views:
                    if view.target is torch.ops.aten.view.default:
                        node = _as_viewed(e, node, view.args[1])
                    node = e.call(cast(Callable, view.target), node, *view.args[1:], **view.kwargs)
                values[replaced] = node
        dims = [(p, d, s.node.expr) for p in self.replace.inputs if p is not None for d, s in sizes.symbolic(g.value(p).shape)]
        size_values = {symbol: g.value(values[p]).shape[d] for p, d, symbol in dims if symbol.is_symbol}

        def resolve(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if argument in values:
                    return values[argument]
                size = sizes.evaluate(g.value(argument), size_values)
                if isinstance(size, int):
                    return size
                p, d = next((p, d) for p, d, symbol in dims if symbol == g.value(argument).node.expr)
                return e.call(torch.ops.aten.sym_size.int, values[p], d)
            if is_number(argument) and argument in self.scalars:
                return found.scalars[self.scalars[argument]]
            return argument

        for node in self.replace.graph.nodes:
            if node.op != "call_function":
                continue
            if not g.is_tensor(node) and isinstance(g.value(node), (int, torch.SymInt)):
                size = sizes.evaluate(g.value(node), size_values)
                if isinstance(size, int):
                    values[node] = size
                    continue
            args, kwargs = tree_map(resolve, (node.args, node.kwargs))
            if node.target is torch.ops.aten.view.default:
                # In the trace its operand was contiguous; what stands for that here may lie in another order.
                args = (_as_viewed(e, args[0], args[1]), *args[1:])
            values[node] = e.call(node.target, *args, **kwargs)
        results = {old: values[new] for old, new in zip(self.search.outputs, self.replace.outputs) if old and new}
        for term in found.other_terms:
            results[self.matcher.anchor] = e.call(torch.ops.aten.add.Tensor, term, results[self.matcher.anchor])
        by_image: dict[fx.Node, Any] = {}
        for output in self.matcher.outputs:
            image, result = found.nodes[output], results[output]
            by_image.setdefault(image, _in_order_of(e, image, result))
        return tuple(by_image.values())


def _proper_subsets(positions: Sequence[int]) -> list[tuple[int, ...]]:
    """The ways to leave some of them out, but not all; of many, one at a time."""
    most = len(positions) if len(positions) <= 3 else 2
    return [left_out for n in range(1, most) for left_out in itertools.combinations(positions, n)]


def _in_order_of(e: Emitter, original: fx.Node, new: fx.Node) -> fx.Node:
    """A result in the memory order of the one that it replaces. PyTorch's pointwise operators keep the order of what they are given, and
    gradients are in that of what autograd was given, while a kernel may always write the order that its example had."""
    old, value = g.value(original), g.value(new)
    order = g.memory_order(old)
    if order is None or value.dim() != old.dim() or g.same_sizes(value.stride(), old.stride()):
        return new
    inverse = sorted(range(len(order)), key=order.__getitem__)
    turned = e.call(torch.ops.aten.permute.default, new, order)
    copied = e.call(torch.ops.aten.clone.default, turned, memory_format=torch.contiguous_format)
    return e.call(torch.ops.aten.permute.default, copied, inverse)


def _as_viewed(e: Emitter, node: fx.Node, shape: Any) -> fx.Node:
    """``node``, or a copy of it where it can't be seen in this shape."""
    if _can_be_viewed(g.value(node), shape):
        return node
    return e.call(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)


def _can_be_viewed(tensor: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether a fake tensor can be seen in another shape without a copy."""
    sizes = [g.value(s) if isinstance(s, fx.Node) else s for s in shape]
    try:
        with detect_fake_mode(tensor) or contextlib.nullcontext():
            torch.ops.aten.view.default(tensor, sizes)
    except (RuntimeError, ValueError):
        return False
    return True


def _reason_of(answer: Any) -> str:
    """Why a match is left, by what the pattern's own check gave."""
    if isinstance(answer, str):
        return answer
    what = "the pattern's own check (when, extra_check) returned"
    if isinstance(answer, torch.SymBool):  # asking for its truth would guard on the sizes
        return f"{what} a condition on symbolic sizes, {answer}; bool() of it holds for these sizes, and compiles anew for others"
    return f"{what} {answer!r}" + ("" if answer is False or answer is None else "; True, False, a reason or a Reject is accepted")


def _used_inside_only(found: SubgraphMatch) -> set[fx.Node]:
    """The views between the matched nodes that nothing outside the match uses."""
    inside = {*found.views, *found.nodes.values()}
    return {v for v in found.views if all(u in inside for u in v.users)}
