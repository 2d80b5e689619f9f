"""Sizes in replacements: numbers, or nodes where they are symbolic, so that one graph serves all sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

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


def chunks_of(emitter: Emitter, size: Any, length: int) -> Any:
    """How many chunks hold so many elements: a number, or a node.

    Of a symbolic number of elements there is a chunk more, so that there are two at least: PyTorch's views would ask whether it is 1, and
    compile again where it is. A maximum says that too, but PyTorch's caches compare its arguments when they read a graph with one, which
    limits the sizes that the graph is for.
    """
    if isinstance(size, int):
        return number_of_chunks(size, length)
    return emitter.call(operator.floordiv, emitter.call(operator.add, size, 2 * length - 1), length)


def number_of_chunks(size: int, length: int, is_symbolic: bool = False) -> int:
    """The number of :func:`chunks_of`, by a size's hint where it is symbolic."""
    return -(-size // length) + is_symbolic


def in_chunks_of(emitter: Emitter, node: fx.Node, axis: int, length: int) -> fx.Node:
    """``node`` with zeros behind this axis, up to whole chunks, and with the axis as two: chunks, and elements of a chunk."""
    sizes = [size_of(emitter, node, i) for i in range(g.value(node).dim())]
    chunks = chunks_of(emitter, sizes[axis], length)
    whole = product_of(emitter, [chunks, length])
    zeros = whole - sizes[axis] if isinstance(whole, int) else emitter.call(operator.sub, whole, sizes[axis])
    with enable_python_dispatcher():  # decompositions that take symbolic sizes
        node = emitter.call(aten.constant_pad_nd.default, node, [0, 0] * (len(sizes) - 1 - axis) + [0, zeros])
    sizes[axis : axis + 1] = [chunks, length]
    return emitter.call(aten.reshape.default, node, sizes)


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
