"""What several replacements compute alike is computed once: a mask in 16 bits for attention, which each layer of a model would make anew.

In training PyTorch's partitioner does that for what is rewritten before it; in inference nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fusebackend import fx_utils as g


def merge_repeated(emitted: Iterable[fx.Node]) -> None:
    """Lets the users of equal nodes read the first of them.

    Nodes that may leave the graph stay apart, since a caller may write to one of them, and so do those that the graph itself writes to, or
    between which it writes to anything.
    """
    nodes = sorted(n for n in emitted if not n._erased)
    if not nodes:
        return
    graph = nodes[0].graph
    writing = [n for n in graph.nodes if g.is_mutating(n)]
    apart = _memory_of_inputs((*writing, graph.output_node()))
    first: dict[Any, fx.Node] = {}
    for node in nodes:
        if not g.may_be_called_early(node) or g.memory_of(g.value(node)) in apart:
            continue
        called = _call(node)
        earlier = first.get(called)
        if earlier is None or any(earlier < w < node for w in writing):
            first[called] = node
            continue
        node.replace_all_uses_with(earlier)
        graph.erase_node(node)


def _memory_of_inputs(nodes: Iterable[fx.Node]) -> set[int | None]:
    """The memory of what they read, by the values, which know whose memory any view sees. With None: what has none may be theirs."""
    read = dict.fromkeys(i for n in nodes for i in n.all_input_nodes)
    return {None, *(g.memory_of(value) for i in read for value in pytree.tree_leaves(g.value(i)))}


def _call(node: fx.Node) -> Any:
    """Operator and arguments. Numbers by type and spelling: 1 and True are equal to Python, 0.0 and -0.0 too, and symbolic sizes guard."""
    leaves, structure = pytree.tree_flatten((node.args, dict(sorted(node.kwargs.items()))))
    return node.target, structure, tuple(x if isinstance(x, fx.Node) else (type(x), repr(x)) for x in leaves)
