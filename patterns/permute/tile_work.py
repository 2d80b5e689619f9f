"""What the kernels of csrc/common/tile, for permute_copy and transpose_add, make a GPU do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusebackend import fx_utils as g
from fusebackend.native import ops
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2, log2_run


def tile_work(kind: str, out: torch.Tensor, order: Sequence[int], *operands: torch.Tensor) -> Work:
    """The work on a GPU of one kernel that computes ``out``, with its dims in memory in ``order``, of one or two operands.

    Symbolic sizes count as their hints, which all have.
    """
    sizes = _known(out.shape)
    strides = [_broadcast_strides(t, sizes) for t in operands]
    offsets = [(g.hint(t.storage_offset()) or 0) * t.itemsize for t in operands]
    second = strides[1] if len(operands) > 1 else []
    facts = ops.facts(torch.ops.fusebackend.tile_work, sizes, strides[0], second, list(order), out.itemsize, offsets[0], offsets[-1])
    total = torch.Size(sizes).numel() * out.itemsize
    quantities = {
        "bytes": float(total * (1 + len(operands))),
        "moved": total * facts["moved"] * (1 + len(operands)),
        "blocks": facts["blocks"],
        "elements": total / facts["element"],
    }
    shape = {name: facts[name] for name in ("tiles", "boxes", "layout", "gathers", "moved")}
    shape |= {f"log2 {name}": log2_run(facts[name]) for name in ("in_run", "out_run", "in_align", "out_align", "element", "inner")}
    shape |= {f"log2 {name}": log2(facts[name]) for name in ("shared", "block_bytes")}
    shape["log2 itemsize"] = log2(out.itemsize)
    return Work(kind, quantities, shape)


def _known(sizes: Sequence) -> list[int]:
    known = g.hints(sizes)
    if known is None:
        raise ValueError("a size that is known only at run time")
    return known


def _broadcast_strides(operand: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    shape, strides = _known(operand.shape), _known(operand.stride())
    missing = len(sizes) - len(shape)
    return [0] * missing + [0 if n == 1 != m else s for n, s, m in zip(shape, strides, sizes[missing:])]
