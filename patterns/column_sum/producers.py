"""What Inductor computes inside a sum: which of the nodes before it become no tensors.

A pointwise node is computed where it is read, and once for each of several readers, as long as it reads few tensors itself
(``torch._inductor.config.realize_reads_threshold``). It becomes a tensor where a reader needs one: a library, or the graph's output.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import fx_utils as g

aten = torch.ops.aten

_MOST_NODES = 64  # of what computes a summed tensor; behind more it has become a tensor anyway
#: Loads from places that the graph computes.
_INDIRECT = frozenset(
    {
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten._unsafe_masked_index.default,
        aten.gather.default,
        aten.index_select.default,
        aten.embedding.default,
    }
)
#: Each element adds up those of all windows that it lies in: called with the sizes of windows third and their strides fourth.
_OF_WINDOWS = frozenset(
    {
        aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default,
        aten.max_pool2d_with_indices_backward.default,
    }
)
#: Loops that fill a tensor in an order of their own.
_SCATTERS = frozenset(
    {
        aten.index_add.default,
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    }
)


@dataclasses.dataclass(frozen=True)
class Producer:
    """What computes the summed tensor inside Inductor's sum.

    Attributes:
        nodes: pointwise nodes, and views between them, that are computed there; none if the tensor is there already.
        read: bytes of what they read, that of indirect loads left out.
        gathered: bytes of elements that are loaded indirectly.
        tensors: what they read, the sources that are there already among it.
    """

    nodes: tuple[fx.Node, ...]
    read: float
    gathered: float
    tensors: frozenset[fx.Node] = frozenset()

    @property
    def is_indirect(self) -> bool:
        return any(n.target in _INDIRECT for n in self.nodes)

    def reads_all_of(self, elements: float) -> bool:
        """Whether a tensor with an element for each that is summed is read directly."""
        return any(_bytes(n) == elements * g.value(n).itemsize for n in self.tensors)


def producer_of(*sources: fx.Node, inside: Collection[fx.Node] = ()) -> Producer:
    """What computes ``sources``, if Inductor would do so inside the sums.

    Args:
        inside: nodes behind the sources that are computed in the same pass. A source that others read too becomes a tensor anyway, or is
            computed twice.
    """
    tensors = Tensors()
    nodes: set[fx.Node] = set()
    reads: set[fx.Node] = set()
    gathered = 0.0
    pending = set(sources)
    while pending:
        node = max(pending)  # all its readers in the sums were met before
        pending.remove(node)
        if node in sources and len(node.users) > 1 and not {*node.users} <= nodes.union(inside):
            reads.add(node)
            continue
        if tensors.is_one(g.through_views(node)) or len(nodes) >= _MOST_NODES:
            reads.add(node)
            continue
        nodes.add(node)
        if node.target in _INDIRECT:  # of the table a part is read, again and again: that counts as gathered
            gathered += _bytes(node)
        pending.update(_inputs(node))
    return Producer(tuple(sorted(nodes)), sum(_bytes(n) for n in reads), gathered, frozenset(reads))


def other_reductions(sums: Collection[fx.Node], tensors: Iterable[fx.Node]) -> list[fx.Node]:
    """Reductions beside ``sums`` that read one of ``tensors``, or what is computed of it element by element: Inductor computes those in one
    pass, where their loops fit.

    The search passes one node that becomes a tensor, which that pass may write, and stops at the next: along the gradient of a residual
    stream each layer's sums would belong to those of all others.
    """
    elements = max(_elements(n) for s in sums for n in s.all_input_nodes)
    kinds, found, seen = Tensors(), set[fx.Node](), set[fx.Node]()
    pending = collections.deque((t, False) for t in tensors if _elements(t) == elements)

    def reach(node: fx.Node, is_behind_tensor: bool) -> None:
        if is_behind_tensor:
            pending.append((node, True))
        else:
            pending.appendleft((node, False))  # first, since a node is met once: by a path without tensors if there is one

    while pending and len(seen) < _MOST_NODES:
        node, is_behind_tensor = pending.popleft()
        for user in node.users:
            if user in seen or user in sums or not isinstance(g.value(user), torch.Tensor):
                continue
            seen.add(user)
            if g.is_view(user):
                reach(user, is_behind_tensor)
            elif _is_pointwise(user) and _elements(user) == elements:
                becomes_tensor = kinds.is_one(user)
                if not (becomes_tensor and is_behind_tensor):
                    reach(user, is_behind_tensor or becomes_tensor)
            elif g.is_fusable(user) and user.target not in _SCATTERS and _elements(user) < elements:
                found.add(user)
    return sorted(found - behind(sums, found))


def behind(sums: Collection[fx.Node], nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Those of ``nodes`` that need the result of one of the sums."""
    if not nodes:
        return set()
    last, reached, pending = max(nodes), set[fx.Node](), list(sums)
    while pending:
        for user in pending.pop().users:
            if user not in reached and user <= last:
                reached.add(user)
                pending.append(user)
    return reached & set(nodes)


class Tensors:
    """Which nodes of a graph, which does not change meanwhile, become tensors in Inductor's code. Each is looked at once."""

    def __init__(self) -> None:
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._found: dict[fx.Node, bool] = {}

    def is_one(self, node: fx.Node, within: int = _MOST_NODES) -> bool:
        """Whether a node, which is no view, becomes a tensor.

        Args:
            within: how many nodes are looked at, one behind the other.
        """
        if within == 0:
            return True
        if node not in self._found:
            self._found[node] = self._find(node, within)
        return self._found[node]

    def _find(self, node: fx.Node, within: int) -> bool:
        if not _is_pointwise(node) or _adds_windows(node):
            return True
        readers = set(g.consumers(node))
        if not all(map(g.is_fusable, readers)):
            return True
        reused = len(readers) > 1 or any(_elements(u) > _elements(node) for u in {*node.users, *readers})  # expanded
        return reused and len(self._read_by(node, within - 1)) > inductor_config.realize_reads_threshold

    def _read_by(self, node: fx.Node, within: int) -> frozenset[fx.Node]:
        """The tensors that are read wherever a pointwise node is computed."""
        if node not in self._reads:
            found = {g.through_views(node.args[0])} if node.target in _INDIRECT else set()
            for source in map(g.through_views, _inputs(node)):
                found |= {source} if self.is_one(source, within) else self._read_by(source, within - 1)
            self._reads[node] = frozenset(found)
        return self._reads[node]


def _inputs(node: fx.Node) -> list[fx.Node]:
    """What a node reads element by element."""
    inputs = [n for n in node.all_input_nodes if isinstance(g.value(n), torch.Tensor)]
    return inputs[1:] if node.target in _INDIRECT else inputs


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a node is computed element by element: what has fewer elements than it reads is a sum of its own."""
    if not g.is_fusable(node) or node.target in _SCATTERS:
        return False
    return all(_elements(n) <= _elements(node) for n in _inputs(node))


def _adds_windows(node: fx.Node) -> bool:
    """Whether a node is the gradient of a pool whose windows overlap: loads of each and comparisons exceed what Inductor computes
    inside of what reads it (``torch._inductor.config.realize_opcount_threshold``)."""
    if node.target not in _OF_WINDOWS:
        return False
    sizes, strides = node.args[2], node.args[3]
    return any(size > stride for size, stride in zip(sizes, strides or sizes))  # type: ignore[arg-type, operator, call-overload]


def _elements(node: fx.Node) -> int:
    value = g.value(node)
    return math.prod(g.hints(value.shape) or [0]) if isinstance(value, torch.Tensor) else 1


def _bytes(node: fx.Node) -> float:
    """Of a tensor as it lies in memory: what is expanded is there once."""
    value = g.value(node)
    if not isinstance(value, torch.Tensor):
        return 0.0
    sizes, strides = g.hints(value.shape) or [], g.hints(value.stride()) or []
    return float(math.prod(n for n, s in zip(sizes, strides) if s != 0) * value.itemsize)
