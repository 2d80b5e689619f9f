"""Sizes in replacements: numbers, or nodes where they are symbolic, so that one graph serves all sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Emitter

aten = torch.ops.aten


def size_of(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """A size: a number, or a node where it is symbolic."""
    size = g.value(node).shape[axis]
    return size if isinstance(size, int) else emitter.call(aten.sym_size.int, node, axis)


def product_of(emitter: Emitter, sizes: Sequence[Any]) -> Any:
    """That of numbers, or of nodes."""
    product: Any = math.prod(size for size in sizes if isinstance(size, int))
    for size in sizes:
        if not isinstance(size, int):
            product = size if isinstance(product, int) and product == 1 else emitter.call(operator.mul, product, size)
    return product


def merged(emitter: Emitter, node: fx.Node, counts: Sequence[int]) -> fx.Node:
    """``node`` with so many neighbouring dims as one, for each of ``counts``."""
    if all(count == 1 for count in counts):
        return node
    sizes = [size_of(emitter, node, axis) for axis in range(sum(counts))]
    shape = []
    for count in counts:
        shape.append(product_of(emitter, sizes[:count]))
        sizes = sizes[count:]
    return emitter.call(aten.reshape.default, node, shape)
