"""Random inputs for timing a graph: of the right shapes, strides and dtypes, and with indices that are in range, or known.

An index out of range does not only give a wrong time: on a GPU it ends the process's CUDA context. So each index is traced back to the
graph's integer inputs, those are drawn below the size of the dimension that they index, and the integer part of the graph is evaluated on
the CPU to check that every index is in range. A graph for which this can't be shown is not timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims  # noqa: F401  defines torch.ops.prims.inductor_*

from fusebackend import fx_utils as g
from fusebackend.native import ops
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.known_indices import Known

aten = torch.ops.aten
prims = torch.ops.prims


# Indexing operators: those that take a list of indices, one a dimension, and those that take one index and its dimension.
_INDEX_LISTS = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index.default,
    aten._unsafe_masked_index_put_accumulate.default,
}
_INDEX_ALONG_DIM = {
    aten.index_select.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}
# Operators that may read integers, whatever the values: none of them can fault.
_HARMLESS = g.VIEWS | {
    aten.abs.default, aten.neg.default,
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar,
    aten.maximum.default, aten.minimum.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor, aten.le.Scalar,
    aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
    aten.where.self, aten.clone.default, aten._to_copy.default, aten.copy.default, aten.copy_.default, aten.cat.default,
    aten.constant_pad_nd.default, aten.cumsum.default, aten.sum.default, aten.sum.dim_IntList, aten.any.default, aten.any.dim,
    aten.amax.default, aten.amin.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.flip.default,
    prims.convert_element_type.default, prims.inductor_lookup_seed.default, prims.inductor_random.default,
    aten._scaled_dot_product_efficient_attention_backward.default,  # the state of a random generator
}  # fmt: skip
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_BOUND_WITHOUT_INDEX = 8  # integers that index nothing are drawn below this

# How floating-point numbers may be drawn: their standard deviation, and whether all are positive. A model's weights are small, and large
# ones make a deep graph overflow. Some inputs are variances.
_STYLES = ((1.0, False), (0.02, False), (0.02, True))


class Samples:
    """Draws inputs for one graph, and for another form of it.

    Args:
        graph: its nodes have fake values.
        fakes: the graph's inputs: fake tensors and SymInts, in the order of the placeholders.
        replaced: a graph with the same inputs that computes the same in another way. Its operators may be anybody's: the integers that
            they read must be indices in ``graph`` already, which says how large they may be.
        copies: how many times the inputs must fit into the memory that is free.
        known: the inputs that are not random, by their positions.

    Raises:
        Unfit: why no inputs can be drawn.
    """

    def __init__(
        self,
        graph: fx.Graph,
        fakes: Sequence[Any],
        replaced: fx.Graph | None = None,
        copies: float = 3.0,
        known: Mapping[int, Known] | None = None,
    ):
        placeholders = graph.find_nodes(op="placeholder")
        self._fakes = list(fakes)
        self._known = {position: index.compute() for position, index in (known or {}).items()}
        self._forms = [_Indexing(graph)] + ([] if replaced is None else [_Indexing(replaced)])
        _check_integer_consumers(graph)
        if replaced is not None:
            _check_integers_of_replacement(replaced, bounded=set(self._forms[0].highs))
        self.mutated = _mutated(graph, placeholders)
        self._style = _STYLES[0]
        _check_memory(self._fakes, copies)

    def draw(self) -> list[Any]:
        """New inputs: real tensors, and the hints of symbolic sizes. Uses torch's default generators."""
        drawn = []
        for position, fake in enumerate(self._fakes):
            high = min([form.highs[position] for form in self._forms if position in form.highs], default=_BOUND_WITHOUT_INDEX)
            drawn.append(_random(fake, high, *self._style) if isinstance(fake, torch.Tensor) else _number(fake))
            if position in self._known:
                drawn[-1].copy_(self._known[position])
        for form in self._forms:
            form.verify(drawn)
        return drawn

    def settle(self, compute: Callable[[list[Any]], Any]) -> None:
        """Chooses how numbers are drawn so that what ``compute`` returns is finite: NaNs may take code paths that real data do not.

        Raises:
            Unfit: it is never finite.
        """
        for self._style in _STYLES:
            results = torch.utils._pytree.tree_leaves(compute(self.draw()))
            if all(bool(r.isfinite().all()) for r in results if isinstance(r, torch.Tensor) and r.is_floating_point()):
                return
        raise Unfit("its results are not finite on random inputs")


class _Indexing:
    """Where a graph indexes, and by what.

    Attributes:
        highs: for every integer input that an index is computed from, by position, the smallest size that it indexes.
    """

    def __init__(self, graph: fx.Graph):
        self._placeholders = graph.find_nodes(op="placeholder")
        self._sites = _index_sites(graph)
        self._cone = _cone(self._sites)
        self.highs: dict[int, int] = {}
        for _, index, size in self._sites:
            for node in _cone([(index, index, size)]):
                if node.op == "placeholder":
                    position = self._placeholders.index(node)
                    self.highs[position] = min(self.highs.get(position, size), size)

    def verify(self, drawn: list[Any]) -> None:
        """Evaluates the integer part of the graph on the CPU. Unfit: an index would be out of range."""
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, drawn))
        for node in self._cone:
            if node.op == "placeholder":
                value = values[node]
                values[node] = value.cpu() if isinstance(value, torch.Tensor) else value
            else:
                values[node] = _on_cpu(node, values)
        for node, index, size in self._sites:
            found = values[index]
            if found.numel() and (int(found.min()) < -size or int(found.max()) >= size):
                raise Unfit(f"random values of {index.name} would be out of range in {g.describe(node)}")


def _index_sites(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, int]]:
    """Every (indexing node, index, size of the dimension that it indexes)."""
    sites = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _INDEX_LISTS:
            call = g.arguments(node)
            of = g.value(call["self"])
            indices = [(i, d) for d, i in enumerate(call["indices"]) if i is not None]
        elif node.target in _INDEX_ALONG_DIM:
            call = g.arguments(node)
            of = g.value(call["self"])
            indices = [(call["index"], call["dim"] % max(of.dim(), 1))]
        elif node.target is aten.embedding.default:
            call = g.arguments(node)
            of, indices = g.value(call["weight"]), [(call["indices"], 0)]
        elif isinstance(node.target, torch._ops.OpOverload) and ops.indices_of(node.target):
            call = g.arguments(node)
            for name, bound in ops.indices_of(node.target).items():
                size = min(map(_hint_of, bounds)) if isinstance(bounds := call[bound], (list, tuple)) else _hint_of(bounds)
                given = call[name] if isinstance(call[name], (list, tuple)) else [call[name]]
                sites += [(node, index, size) for index in given if index is not None]
            continue
        else:
            continue
        for index, dim in indices:
            if g.value(index).dtype is torch.bool:
                raise Unfit(f"{g.describe(node)} indexes by a mask, whose number of hits is not known")
            size = (g.hint(of.shape[dim]) if of.dim() else 1) or 0
            sites.append((node, index, size))
    return sites


def _hint_of(size: Any) -> int:
    return g.hint(g.value(size) if isinstance(size, fx.Node) else size) or 0


def _cone(sites: list[tuple[fx.Node, fx.Node, int]]) -> list[fx.Node]:
    """The nodes that the indices are computed from, in order."""
    found: set[fx.Node] = set()
    stack = [index for _, index, _ in sites]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        value = g.value(node)
        if isinstance(value, torch.Tensor) and value.dtype not in _INTEGERS and value.dtype is not torch.bool:
            raise Unfit(f"an index is computed from {node.name}, which is {value.dtype}")
        found.add(node)
        stack += node.all_input_nodes
    return sorted(found)


def _check_integer_consumers(graph: fx.Graph) -> None:
    for node, _ in _readers_of_unknown_integers(graph):
        raise Unfit(f"it is not known which integers {g.describe(node)} accepts")


def _check_integers_of_replacement(graph: fx.Graph, bounded: set[int]) -> None:
    """Whatever reads integers that are not known to be harmless there, they come from inputs that index in the original too."""
    placeholders = graph.find_nodes(op="placeholder")
    for node, integers in _readers_of_unknown_integers(graph):
        seen, stack = set(), [integers]
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            stack += source.all_input_nodes
            is_integer = isinstance(g.value(source), torch.Tensor) and g.value(source).dtype in _INTEGERS
            if source.op == "placeholder" and is_integer and placeholders.index(source) not in bounded:
                raise Unfit(f"{source.name} indexes nothing in the original: it is not known which integers {g.describe(node)} accepts")


def _readers_of_unknown_integers(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node that may fault by the values of integers that it reads, with one that it reads."""
    allowed = _HARMLESS | _INDEX_LISTS | _INDEX_ALONG_DIM | {aten.embedding.default}
    for node in graph.nodes:
        if node.op != "call_function" or node.target in allowed:
            continue
        if isinstance(node.target, torch._ops.OpOverload) and ops.indices_of(node.target):
            continue
        for i in node.all_input_nodes:
            value = g.value(i)
            if isinstance(value, torch.Tensor) and value.dtype in _INTEGERS:
                yield node, i


def _mutated(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> list[int]:
    """The positions of the inputs that the graph writes to."""
    found = set()
    for node in graph.nodes:
        if not g.is_mutating(node):
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unfit(f"it is not known what {g.describe(node)} writes to")
        call = g.arguments(node)
        for argument in node.target._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = call[argument.name]
                for each in written if isinstance(written, (list, tuple)) else [written]:
                    if isinstance(each, fx.Node):
                        found.add(g.through_views(each))
    return [i for i, p in enumerate(placeholders) if p in found]


def _check_memory(fakes: Sequence[Any], copies: float) -> None:
    needed: dict[torch.device, int] = {}
    for fake in fakes:
        if isinstance(fake, torch.Tensor):
            needed[fake.device] = needed.get(fake.device, 0) + _extent(fake) * fake.itemsize
    for device, size in needed.items():
        free = _free(device)
        if size * copies > free:
            raise Unfit(f"its inputs, {size >> 20} MiB, may not fit {copies:g} times into the {free >> 20} MiB that are free on {device}")


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        found = g.hint(value)
        if found is None:
            raise Unfit(f"the size {value} is not known before run time")
        return found
    if isinstance(value, (int, float, bool)):
        return value
    raise Unfit(f"an input is a {type(value).__name__}")


def _hints(sizes: Any) -> list[int]:
    found = g.hints(sizes)
    if found is None:
        raise Unfit("sizes are not known before run time (unbacked symbols)")
    return found


def _extent(fake: torch.Tensor) -> int:
    sizes, strides = _hints(fake.shape), _hints(fake.stride())
    return 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides))


def _random(fake: torch.Tensor, high: int, deviation: float, positive: bool) -> torch.Tensor:
    if fake.layout is not torch.strided or type(fake) is not torch._subclasses.FakeTensor:
        raise Unfit(f"an input is a {fake.layout} tensor of {type(fake).__name__}")
    memory = torch.empty(_extent(fake), dtype=fake.dtype, device=fake.device)
    if fake.is_complex():
        torch.view_as_real(memory).normal_()
    elif fake.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        memory.normal_(0, deviation)
        if positive:
            memory.abs_()
    elif fake.dtype is torch.bool:
        memory.random_(0, 2)
    elif fake.dtype in _INTEGERS:
        memory.random_(0, max(min(high, torch.iinfo(fake.dtype).max), 1))
    else:
        memory.copy_(torch.randn(memory.shape, device=fake.device))
    return memory.as_strided(_hints(fake.shape), _hints(fake.stride()))


def _on_cpu(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op != "call_function":
        raise Unfit(f"an index is computed from {node.op} {node.name}")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    call: Any = node.target
    return call(*args, **kwargs)
