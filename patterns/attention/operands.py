"""Where the operands of products come from: through views, casts and scalings."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import Dim, Dims, after, before, holds, is_cast, is_view, leaves
from fusebackend.patterns.attention.numbers import scaling

aten = torch.ops.aten

#: Products of matrices, without what ``baddbmm`` adds.
PRODUCTS = frozenset({aten.bmm.default, aten.mm.default})
_MOST_STEPS = 24


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a product of matrices; None if ``node`` is none.

    Inductor's decompositions multiply columns by rows, (batch, M, 1) by (batch, 1, N), element by element: gradients where there is one
    query, and results where there is one key.
    """
    if node.target in PRODUCTS:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    if node.target is not aten.mul.Tensor or not all(g.is_tensor(a) for a in node.args):
        return None
    left, right = (g.value(a).shape for a in node.args)
    if not len(left) == len(right) == 3 or not g.same_size(left[0], right[0]) or g.same_size(g.value(node).numel(), left[0]):
        return None
    return node.args if g.same_size(left[2], 1) and g.same_size(right[1], 1) else None  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Link:
    """A node of which an operand is computed: ``operand = factor * views(node)``.

    Attributes:
        is_same: whether only views and conversions to wider types lie between: the node holds the operand's values.
    """

    node: fx.Node
    dims: Dims
    factor: float
    is_same: bool


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a product, with what it is computed from: itself first, the deepest node last."""

    links: tuple[Link, ...]

    @property
    def node(self) -> fx.Node:
        return self.links[0].node

    def sources(self, dtype: torch.dtype, *, scaled: bool) -> list[Link]:
        """Nodes of that dtype from which the kernel may read this operand: of all links the deepest, then the deepest that holds the
        operand's own values.

        Args:
            scaled: whether scalings may lie between.
        """
        fitting = [link for link in self.links if g.value(link.node).dtype == dtype and (scaled or link.factor == 1.0)]
        same = [link for link in fitting if link.is_same]
        return [*fitting[-1:], *(same[-1:] if same[-1:] != fitting[-1:] else [])]

    def dims_of(self, node: fx.Node, dtype: torch.dtype) -> Dims | None:
        """The dims of ``node`` if it holds this operand's values, by views and casts.

        A node before a rounding of the operand holds them only once it was rounded to ``dtype``, as what the kernel reads is: under
        autocast the products of the backward convert anew what those of the forward converted.
        """
        path: list[fx.Node] = []
        known = {link.node: i for i, link in enumerate(self.links) if link.factor == 1.0}
        while node not in known:
            if not (is_view(node) or is_cast(node)) or len(path) == _MOST_STEPS:
                return None
            path.append(node)
            node = node.args[0]  # type: ignore[assignment]
        at = known[node]
        casts = [g.value(step).dtype for step in path if is_cast(step)]
        between = [g.value(link.node).dtype for link in self.links[:at]]
        if not self.links[at].is_same and dtype not in casts:
            return None
        if not all(holds(wide, dtype) for wide in (*casts, *between)):  # rounded to another type
            return None
        dims: Dims | None = self.links[at].dims
        for step in reversed(path):
            dims = None if dims is None else after(step, dims)
        return dims


def read_operand(node: fx.Node, dims: Dims) -> Operand:
    links = [Link(node, dims, 1.0, True)]
    while len(links) < _MOST_STEPS:
        link = links[-1]
        scaled = scaling(link.node)
        if scaled is not None:
            source, factor, same = scaled[0], scaled[1] * link.factor, False
        elif is_view(link.node) or is_cast(link.node):
            source, factor = link.node.args[0], link.factor  # type: ignore[assignment]
            same = link.is_same and holds(g.value(link.node).dtype, g.value(source).dtype)
        else:
            break
        if g.value(source).dtype not in (torch.float16, torch.bfloat16, torch.float32):
            break
        found = before(link.node, link.dims)
        if found is None:
            break
        links.append(Link(source, found, factor, same))
    return Operand(tuple(links))


def split_product(dims: Dims) -> tuple[Dim, Dim, Dim]:
    """(batch, rows, columns) of an operand or the result of a product."""
    return (leaves(dims[0]) if len(dims) == 3 else ()), leaves(dims[-2]), leaves(dims[-1])
