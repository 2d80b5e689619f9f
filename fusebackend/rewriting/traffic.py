"""How many bytes operators read and write: a yardstick that is the same on every device, for what part of a graph something is."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fusebackend import fx_utils as g


def operators(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that compute: no inputs, results, views."""
    return [n for n in nodes if n.op == "call_function" and not g.is_view(n)]


def moved_bytes(nodes: Iterable[fx.Node]) -> int:
    """The bytes of all tensors that each operator reads and writes, at the sizes with which it was traced, as if none were fused."""
    return sum(_bytes(n) + sum(map(_bytes, n.all_input_nodes)) for n in operators(nodes))


def _bytes(node: fx.Node) -> int:
    found = g.value(node)
    tensors = (found,) if isinstance(found, torch.Tensor) else pytree.tree_leaves(found)
    return sum(_tensor_bytes(t) for t in tensors if isinstance(t, torch.Tensor))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    sizes = g.hints(tensor.shape)
    return 0 if sizes is None else math.prod(sizes) * tensor.element_size()
