"""What a product of small matrices is."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx


@dataclasses.dataclass(frozen=True)
class Site:
    """``aten.bmm``.

    Attributes:
        node: the call.
        operands: the fake values of its operands.
        transposed: whether the matrices of each lie by columns.
    """

    node: fx.Node
    operands: tuple[torch.Tensor, torch.Tensor]
    transposed: tuple[bool, bool]
