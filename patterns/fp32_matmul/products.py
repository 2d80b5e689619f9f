"""Reads matrix products and their operands in a graph."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.fp32_matmul.ops import pitch

aten = torch.ops.aten

TARGETS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@dataclasses.dataclass(frozen=True)
class Product:
    """``alpha * a @ b + beta * d`` at ``node``, one of ``TARGETS``."""

    node: fx.Node
    a: fx.Node
    b: fx.Node
    d: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @classmethod
    def read(cls, node: fx.Node) -> Product:
        named = g.arguments(node)
        if node.target in (aten.mm.default, aten.bmm.default):
            return cls(node, named["self"], named["mat2"])
        a, b = ("mat1", "mat2") if node.target is aten.addmm.default else ("batch1", "batch2")
        return cls(node, named[a], named[b], named["self"], named["alpha"], named["beta"])

    @property
    def operands(self) -> list[torch.Tensor]:
        return [g.value(n) for n in (self.a, self.b, self.d) if n is not None]

    @property
    def device(self) -> torch.device:
        return g.value(self.a).device

    @property
    def sizes(self) -> list[int] | None:
        """``[m, k, n, batch]`` as they were when the graph was traced; None if one depends on data."""
        a, b = g.value(self.a), g.value(self.b)
        return g.hints((*a.shape[-2:], b.shape[-1], a.shape[0] if a.dim() == 3 else 1))


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix that ``node`` is the transpose of, if it is one, and whether it is."""
    if node.op == "call_function" and node.target is aten.permute.default:
        if list(node.args[1]) in ([1, 0], [0, 2, 1]):
            return node.args[0], True
    return node, False


def bytes_of_planes(operand: fx.Node, inner: int = -1) -> int | None:
    """Bytes of the planes of an operand with dimension ``inner`` innermost, by the sizes that it had when traced."""
    sizes = g.hints(g.value(operand).shape)
    return sizes and 6 * math.prod(sizes) // max(sizes[inner], 1) * pitch(sizes[inner])


def scaled(product: Product) -> tuple[fx.Node, float] | None:
    """The multiplication by a number that is the only user of a product, if ``alpha`` can take it over: its node, and the new alpha.

    Only without an addend: ``(ab + d) * c`` and ``c * ab + c * d`` overflow for different ``ab`` and ``d``. If ``alpha`` and the number are
    both at least 1, or both at most 1, the value in between is out of range only if the result is.
    """
    users = list(product.node.users)
    if (product.d is not None and product.beta != 0) or len(users) != 1 or users[0].target is not aten.mul.Tensor:
        return None
    if g.value(users[0]).dtype != torch.float32:
        return None
    number = next((a for a in users[0].args if isinstance(a, (int, float))), None)
    if number is None:
        return None
    alpha, numbers = float(product.alpha * number), (abs(product.alpha), abs(number))
    same_side = 1 in numbers or (numbers[0] < 1) == (numbers[1] < 1)
    fp32 = torch.finfo(torch.float32)
    return (users[0], alpha) if same_side and fp32.tiny <= abs(alpha) <= fp32.max else None
