"""What is computed of each element, read from the graph as a program (:mod:`fusebackend.patterns.computed_sums.program`).

Pointwise nodes are seen through down to what is a tensor in any case: inputs of the graph, and what a library, a reduction or one of our
operators gives or reads. Views between them are moved to these tensors, of which the operator reads views.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.producers import Tensors
from fusebackend.patterns.column_sum.work import contiguous
from fusebackend.patterns.computed_sums.ops import RESULTS
from fusebackend.patterns.computed_sums.program import MOST_INPUTS, Writer
from fusebackend.rewriting.interpret import rounds_each_node

aten, prims = torch.ops.aten, torch.ops.prims

#: Dtypes of what programs read.
READ = RESULTS | {torch.bool}
_MOST_STATEMENTS = 64
#: Casts and views among them, a node once for each view of it that is read: behind more no node is looked at. Python does not recurse too
#: deep then, nor is a node looked at over and over, by each of the paths through transposes that lead to it.
_MOST_VALUES = 2 * _MOST_STATEMENTS
_FULL = 0.5  # the part of all elements from which on a tensor counts as one that is read in full
#: A tensor that Inductor makes is read where it is so many times smaller than what it is computed of: sums and a gradient would read
#: that twice, instead of once, and this tensor is written once and read twice.
_SMALLER = 3

_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
_CONSTANTS = frozenset({aten.full.default, aten.scalar_tensor.default})

_SIMPLE = {
    **{getattr(aten, name).default: name for name in ("neg", "abs", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt")},
    **{getattr(aten, name).default: name for name in ("reciprocal", "sigmoid", "tanh", "erf", "sin", "cos", "relu")},
    **{getattr(aten, name).Tensor: name for name in ("mul", "lt", "le", "gt", "ge", "eq", "ne")},
    **{getattr(aten, name).Scalar: name for name in ("mul", "lt", "le", "gt", "ge", "eq", "ne")},
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.clamp_min.default: "maximum",
    aten.clamp_max.default: "minimum",
    aten.where.self: "where",
    aten.logical_and.default: "and",
    aten.logical_or.default: "or",
    aten.logical_not.default: "not",
}
_ON_TRUTH_VALUES = {aten.bitwise_and.Tensor: "and", aten.bitwise_or.Tensor: "or", aten.bitwise_not.default: "not"}
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}  # and so it is for -inf, of which pow gives a root
_SUMS = {aten.add.Tensor: "add", aten.add.Scalar: "add", aten.sub.Tensor: "sub", aten.sub.Scalar: "sub"}  # of which `alpha` is an argument


class Unreadable(Exception):
    """A node that no program computes; ``args`` are the reason and the node."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor that a program reads.

    Attributes:
        node: it.
        views: nodes whose views of it are read, one behind the other.
    """

    node: fx.Node
    views: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class Expression:
    """A program with what it reads.

    Attributes:
        program: the text.
        leaves: its inputs.
        nodes: what it computes, and the views between, in the order of the graph.
        statements: how many functions it computes.
    """

    program: str
    leaves: tuple[Leaf, ...]
    nodes: tuple[fx.Node, ...]
    statements: int


def read(results: Sequence[fx.Node], elements: int, *, stored: bool = False) -> Expression:
    """The program that computes ``results``, tensors of so many elements each.

    Args:
        stored: whether they are what becomes of the program, and not tensors that it reads if they are ones anyway.

    Raises:
        Unreadable: there is none.
    """
    return _Reader(elements, frozenset(results if stored else ())).read(results)


def is_tensor_anyway(node: fx.Node) -> bool:
    """Whether a node is in memory whatever becomes of those that read it: what is not computed element by element, and what something else
    than Inductor's loops reads."""
    return not is_pointwise(node) or not all(map(g.is_fusable, g.consumers(node)))


def is_pointwise(node: fx.Node) -> bool:
    """Whether programs may compute a node."""
    known = node.target in _SIMPLE or node.target in _ON_TRUTH_VALUES or node.target in _SUMS or node.target in _OTHERS
    return node.op == "call_function" and known and g.is_tensor(node)


class _Cuts:
    """At which nodes a program begins, since it reads less there."""

    def __init__(self, elements: int):
        self._elements = elements
        self._tensors = Tensors()
        self._below: dict[fx.Node, frozenset[fx.Node]] = {}
        self._is_cut: dict[fx.Node, bool] = {}

    def is_one(self, node: fx.Node) -> bool:
        """Whether ``node``, no view, is a tensor anyway; or Inductor makes it one, much smaller than what it is computed of."""
        if node not in self._is_cut:
            cut = is_tensor_anyway(node)
            if not cut and self._tensors.is_one(node):
                cut = sum(map(self._bytes, self.below(node))) > _SMALLER * self._bytes(node)
            self._is_cut[node] = cut
        return self._is_cut[node]

    def is_stored(self, node: fx.Node) -> bool:
        """Whether Inductor makes a pointwise node a tensor."""
        return self._tensors.is_one(node)

    def below(self, node: fx.Node) -> frozenset[fx.Node]:
        """The tensors of which a pointwise node is computed."""
        if node not in self._below:
            found = set[fx.Node]()
            for source in map(g.through_views, node.all_input_nodes):
                if g.is_tensor(source):
                    found |= {source} if self.is_one(source) else self.below(source)
            self._below[node] = frozenset(found)
        return self._below[node]

    def _bytes(self, node: fx.Node) -> int:
        """What is read again and again lies in a cache."""
        value = g.value(node)
        elements = math.prod(g.hints(value.shape) or [0])
        return elements * value.itemsize if elements >= _FULL * self._elements else 0


#: Of each graph, what was found of it for tensors of some size: many sums read the same nodes. When a substitution has changed the graph it
#: is found anew; where the graph is as long as before, what is old begins programs elsewhere, which is as right.
_KNOWN_CUTS: weakref.WeakKeyDictionary[fx.Graph, tuple[int, dict[int, _Cuts]]] = weakref.WeakKeyDictionary()


def _cuts_of(graph: fx.Graph, elements: int) -> _Cuts:
    length, known = _KNOWN_CUTS.get(graph, (-1, {}))
    if length != len(graph.nodes):
        known = {}
        _KNOWN_CUTS[graph] = len(graph.nodes), known
    return known.setdefault(elements, _Cuts(elements))


class _Reader:
    def __init__(self, elements: int, stored: frozenset[fx.Node]):
        self._elements = elements
        self._stored = stored
        self._writer = Writer()
        self._leaves: dict[Leaf, str] = {}
        self._nodes: set[fx.Node] = set()
        self._values = 0
        self._known: dict[tuple[fx.Node, tuple[fx.Node, ...]], str] = {}

    def read(self, results: Sequence[fx.Node]) -> Expression:
        self._cuts = _cuts_of(results[0].graph, self._elements)
        self._device = g.value(results[0]).device
        try:
            found = [self.value(n, ()) for n in results]
        except RecursionError:
            raise Unreadable("it is computed by a chain of too many nodes", results[0]) from None
        for name in found:
            self._writer.out(name)
        return Expression(str(self._writer), tuple(self._leaves), tuple(sorted(self._nodes)), len(self._writer))

    def value(self, node: fx.Node, views: tuple[fx.Node, ...]) -> str:
        """The name of the value of a node, of which ``views`` are read."""
        key = node, views
        if key not in self._known:
            self._known[key] = self.compute(node, views)
        return self._known[key]

    def compute(self, node: fx.Node, views: tuple[fx.Node, ...]) -> str:
        if node.target in _VIEWS:
            self.add(node)
            source = node.args[0]
            assert isinstance(source, fx.Node)
            is_broadcast = node.target is aten.expand.default and not views  # as programs read all they read
            return self.value(source, views if is_broadcast else (node, *views))
        if node.target in _CONSTANTS:
            return self.constant(node)
        is_cut = self._cuts.is_one(node) or not self.is_viewed_alike(node, views) or self.is_small_and_unreadable(node)
        if is_cut and node not in self._stored:
            return self.leaf(Leaf(node, views))
        if len(self._writer) >= _MOST_STATEMENTS or self._values >= _MOST_VALUES:
            raise Unreadable(f"more than {_MOST_STATEMENTS} functions or {_MOST_VALUES} values are computed", node)
        dtype = g.value(node).dtype
        if dtype not in READ:
            raise Unreadable(f"{g.describe(node)} computes {dtype}: programs compute fp32 of 32 and 16 bits, and truth values", node)
        self.add(node)
        call = g.arguments(node)
        if node.target in _OTHERS:
            found = _OTHERS[node.target](self, node, call, views)
        elif node.target in _SUMS:
            found = self.sum(_SUMS[node.target], call, views)
        else:
            if node.target in _ON_TRUTH_VALUES and dtype is not torch.bool:
                raise Unreadable(f"{g.describe(node)} of {dtype} is not supported", node)
            name = _SIMPLE.get(node.target) or _ON_TRUTH_VALUES[node.target]
            found = self._writer.call(name, *(self.argument(a, views) for a in call.values()))
        return self._writer.truth(found) if dtype is torch.bool else self.rounded(found, node)

    def add(self, node: fx.Node) -> None:
        """Notes that a value of a node is computed, or viewed, in the program."""
        self._nodes.add(node)
        self._values += 1

    def is_small_and_unreadable(self, node: fx.Node) -> bool:
        """Whether a small tensor is computed by numbers that are, as the count of a mean whose size is symbolic, or in other dtypes."""
        value = g.value(node)
        if is_full(g.hints(value.shape) or [0], self._elements):
            return False
        arguments = [a for a in g.arguments(node).values() if isinstance(a, (fx.Node, torch.SymInt, torch.SymFloat))]
        return value.dtype not in READ or not all(map(g.is_tensor, arguments))

    def rounded(self, name: str, node: fx.Node) -> str:
        """The value of ``node`` as Inductor has it: in fp32 between nodes of 16 bits, and rounded where it stores a node, or is told to
        round as eager mode does; or as the graph has it, if that is run as it is. A norm's statistics are taken of what was stored: they
        do not fit to unrounded numbers."""
        dtype = g.value(node).dtype
        if dtype.itemsize != 2 or node in self._stored:
            return name
        if not (inductor_config.emulate_precision_casts or rounds_each_node(node.graph) or self._cuts.is_stored(node)):
            return name
        return self._writer.call("bf16" if dtype is torch.bfloat16 else "fp16", name)

    def argument(self, argument: Any, views: tuple[fx.Node, ...]) -> str:
        if isinstance(argument, fx.Node):
            if not g.is_tensor(argument):
                raise Unreadable(f"{g.describe(argument)} is a number that is computed", argument)
            return self.value(argument, views)
        if isinstance(argument, numbers.Real):
            return repr(float(argument))
        raise Unreadable(f"the argument {argument} is no number", None)

    def sum(self, name: str, call: dict[str, Any], views: tuple[fx.Node, ...]) -> str:
        other = self.argument(call["other"], views)
        if call["alpha"] != 1:
            other = self._writer.call("mul", other, self.argument(call["alpha"], views))
        return self._writer.call(name, self.argument(call["self"], views), other)

    def power(self, node: fx.Node, call: dict[str, Any], views: tuple[fx.Node, ...]) -> str:
        x, exponent = self.argument(call["self"], views), call["exponent"]
        if exponent == 1:
            return self._writer.number(x)
        if exponent == 3:  # as Inductor multiplies
            return self._writer.call("mul", self._writer.call("square", x), x)
        if exponent in _POWERS:
            return self._writer.call(_POWERS[exponent], x)
        return self._writer.call("pow", x, self.argument(exponent, views))

    def quotient(self, node: fx.Node, call: dict[str, Any], views: tuple[fx.Node, ...]) -> str:
        return self._writer.call("div", self.argument(call["self"], views), self.argument(call["other"], views))

    def clamped(self, node: fx.Node, call: dict[str, Any], views: tuple[fx.Node, ...]) -> str:
        found = self.argument(call["self"], views)
        for bound, name in ((call["min"], "maximum"), (call["max"], "minimum")):
            if bound is not None:
                found = self._writer.call(name, found, self.argument(bound, views))
        return found

    def cast(self, node: fx.Node, call: dict[str, Any], views: tuple[fx.Node, ...]) -> str:
        source, dtype = call["a"], call["dtype"]
        found = self.argument(source, views)
        if g.value(source).dtype not in READ:
            raise Unreadable(f"a cast of {g.value(source).dtype} is not supported", node)
        return self._writer.truth(found) if dtype is torch.bool else self._writer.number(found)

    def constant(self, node: fx.Node) -> str:
        call = g.arguments(node)
        value = call["fill_value"] if "fill_value" in call else call["s"]
        if not isinstance(value, numbers.Real) or g.value(node).dtype not in RESULTS:
            raise Unreadable(f"{g.describe(node)} is no constant of a supported dtype", node)
        self._nodes.add(node)
        return repr(float(value))

    def leaf(self, leaf: Leaf) -> str:
        value = g.value(leaf.node)
        if not isinstance(value, torch.Tensor) or value.dtype not in READ:
            raise Unreadable(f"{g.describe(leaf.node)} gives {g.spec(value)}: fp32, 16 bits and truth values are read", leaf.node)
        if value.device != self._device:
            raise Unreadable(f"{g.describe(leaf.node)} is on {value.device}, and what is computed on {self._device}", leaf.node)
        for known, name in self._leaves.items():
            if known.node is leaf.node and is_same_view(known, leaf):
                return name
        if len(self._leaves) == MOST_INPUTS:
            raise Unreadable(f"more than {MOST_INPUTS} tensors are read", leaf.node)
        self._leaves[leaf] = name = f"i{len(self._leaves)}"
        if value.dtype is torch.bool:
            self._writer.truths.add(name)
        return name

    def is_viewed_alike(self, node: fx.Node, views: tuple[fx.Node, ...]) -> bool:
        """Whether views of a node are views of all that it reads, too."""
        if not views:
            return True
        shape = g.value(node).shape
        for source in node.all_input_nodes:
            if g.is_tensor(source) and source.target not in _CONSTANTS:
                other = g.value(source).shape
                if not g.same_sizes(other, shape):
                    return False
        return True


_OTHERS: dict[Any, Callable] = {
    aten.pow.Tensor_Scalar: _Reader.power,
    aten.div.Tensor: _Reader.quotient,
    aten.div.Scalar: _Reader.quotient,
    aten.clamp.default: _Reader.clamped,
    prims.convert_element_type.default: _Reader.cast,
}


# ---- how leaves lie in memory ----


def layout(leaf: Leaf) -> tuple[list[int], list[int]] | None:
    """The sizes and strides, by hints, of the view of a leaf that is read; None if one has no hint. What is no view of it is contiguous."""
    found = _viewed(leaf)
    return None if found is None else (list(found[0].shape), list(found[0].stride()))


def _viewed(leaf: Leaf) -> tuple[torch.Tensor, bool] | None:
    """A tensor without data that lies as the view of a leaf, and whether it is a copy; None if a size or a stride has no hint."""
    value = g.value(leaf.node)
    sizes, strides = g.hints(value.shape), g.hints(value.stride())
    if sizes is None or strides is None:
        return None
    with g.plain_tensors():
        whole = found = torch.empty_strided(sizes, strides, device="meta")
        for view in leaf.views:
            arguments = fx.node.map_arg(view.args[1:], lambda n: g.hint(g.value(n)))
            arguments = torch.utils._pytree.tree_map(lambda a: g.hint(a) if isinstance(a, torch.SymInt) else a, arguments)
            found = as_view(view)(found, *arguments, **view.kwargs)
    return found, not g.share_storage(whole, found)


def is_of_columns(leaf: Leaf, order: Sequence[int]) -> bool:
    """Whether a leaf has one dim, which its views make the last one of ``order`` without touching its elements."""
    value, found = g.value(leaf.node), _viewed(leaf)
    if value.dim() != 1 or found is None or found[1]:
        return False
    size, step, seen = g.hint(value.shape[0]), g.hint(value.stride(0)), found[0]
    if not isinstance(value.shape[0], int) and (size == 1 or any(len(view.all_input_nodes) > 1 for view in leaf.views)):
        return False  # other dims might be longer than 1 in another call
    long = [d for d in range(seen.dim()) if seen.shape[d] != 1]
    is_whole = seen.numel() == size and seen.storage_offset() == 0
    is_last = all(len(order) - seen.dim() + d == order[-1] and seen.stride(d) == step for d in long)
    return is_whole and len(long) <= 1 and is_last


def is_same_view(a: Leaf, b: Leaf) -> bool:
    """Whether two views of one tensor that leave no element out broadcast alike."""
    if a.views == b.views:
        return True
    if not all(isinstance(n, int) for n in g.value(a.node).shape):
        return False
    found = [_viewed(leaf) for leaf in (a, b)]
    places = [_places(t.shape, t.stride()) for t, is_copy in filter(None, found) if not is_copy]  # a copy's say nothing of the leaf
    return len(places) == 2 and places[0] == places[1]


def _places(sizes: Sequence[int], strides: Sequence[int]) -> dict[int, tuple[int, int]]:
    """By the dim, counted from the last one: where the elements lie along those that are longer than 1."""
    rank = len(sizes)
    return {d - rank: (sizes[d], strides[d]) for d in range(rank) if sizes[d] > 1}


def laid_out(order: Sequence[int], leaf: Leaf, is_relaid: bool = False) -> tuple[list[int], list[int]] | None:
    """The sizes and strides of what is read of a leaf, in the order of memory; None if they are not known.

    Args:
        is_relaid: whether a leaf that has all these dims will lie so, whatever its strides in the graph say.
    """
    found = layout(leaf)
    if found is None:
        return None
    missing = len(order) - len(found[0])
    sizes, strides = [1] * missing + found[0], [0] * missing + found[1]
    sizes, strides = [sizes[d] for d in order], [strides[d] for d in order]
    return (sizes, contiguous(sizes)) if is_relaid and 1 not in sizes else (sizes, strides)


def as_matrix(sizes: Sequence[int], strides: Sequence[int], begin: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """With the dims from ``begin`` on as one, which the caller knows to lie side by side or to be broadcast."""
    columns = math.prod(sizes[begin:])
    inner = next((stride for size, stride in zip(reversed(sizes[begin:]), reversed(strides[begin:])) if size > 1), 0)
    return (*sizes[:begin], columns), (*strides[:begin], inner)


def as_view(view: fx.Node) -> Callable[..., torch.Tensor]:
    """The function of a node in ``Leaf.views``: what is moved to another tensor may have to copy."""
    return aten.reshape.default if view.target in _RESHAPES else view.target  # type: ignore[return-value]


def is_full(sizes: Sequence[int], elements: int) -> bool:
    """Whether a tensor of these sizes is read element by element, and not again and again."""
    return math.prod(sizes) >= _FULL * elements


@functools.cache
def collapses(sizes: tuple[int, ...], strides: tuple[int, ...], domain: tuple[int, ...]) -> bool:
    """Whether the kernels read a tensor where it lies: its last dim side by side or broadcast, and the others like one dim, which may be
    broadcast along outer and inner ones. It is not the library that is asked (``ops.kind``), since sites are read without one too; the
    library's kernels also read one number a row where these lie column by column."""
    if sizes[-1] > 1 and strides[-1] != 1:
        return False
    rows = [(n, size, stride) for n, size, stride in zip(domain[:-1], sizes[:-1], strides[:-1]) if n > 1]
    while rows and rows[0][1] == 1:
        rows.pop(0)
    while rows and rows[-1][1] == 1:
        rows.pop()
    return all(a[1] > 1 and b[1] > 1 and a[2] == b[1] * b[2] for a, b in zip(rows, rows[1:]))
