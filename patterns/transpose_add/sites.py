"""The sums of operands in different memory orders."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fusebackend import fx_utils as g


@dataclasses.dataclass(frozen=True)
class Sum:
    """An addition or subtraction.

    Attributes:
        node: the call.
        out: its fake value.
        operands: those of its operands.
    """

    node: fx.Node
    out: torch.Tensor
    operands: tuple[torch.Tensor, torch.Tensor]


def is_transposed(operand: torch.Tensor, out: torch.Tensor) -> bool | None:
    """Whether ``operand`` is contiguous along another dim than ``out`` and also varies along that of ``out``; None if sizes are not known.

    A small operand that is broadcast along the dim of ``out`` is read from cache, whatever its order.
    """
    sizes, strides = g.hints(operand.shape), g.hints(operand.stride())
    out_sizes, out_strides = g.hints(out.shape), g.hints(out.stride())
    if sizes is None or strides is None or out_sizes is None or out_strides is None:
        return None
    missing = len(out_sizes) - len(sizes)
    broadcast = [0] * missing + [0 if n == 1 else s for n, s in zip(sizes, strides)]
    fastest = next((d for d, s in enumerate(broadcast) if s == 1), None)
    out_fastest = next((d for d, s in enumerate(out_strides) if s == 1 and out_sizes[d] > 1), None)
    if fastest is None or out_fastest is None:
        return False
    return fastest != out_fastest and broadcast[out_fastest] != 0
