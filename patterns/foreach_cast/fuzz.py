"""What the fuzzer draws for this family: products of several weights that are cast, and near misses."""

from __future__ import annotations

import torch

from fusebackend.fuzz.builder import Builder

_HALVES = (torch.bfloat16, torch.float16)


def foreach_cast(b: Builder) -> bool | None:
    """A chain of products with weights of fp32, each cast to 16 bits before it, as autocast does; some are added, sliced or read twice."""
    if b.dtype not in _HALVES:
        return False
    name = "bf16" if b.dtype == torch.bfloat16 else "f16"
    columns = b.pick((3, 8, 5, 1))
    x = b.input((b.pick((4, 1, 7)), columns))
    for _ in range(b.integer(2, 5)):
        following = b.pick((8, 3, 5))
        transposed = b.chance(30)
        w = b.input((following, columns) if transposed else (columns, following), torch.float32)
        if b.chance(10):
            w = b.emit(f"{w} * 2") or w
        half = b.emit(f"{w}.to({name})")
        if half is None:
            return False
        if transposed:
            half = b.emit(f"{half}.t()", moves=True) or half
        if b.chance(10):
            b.emit(f"{half} + 1")
        product = b.emit(f"{x} @ {half}")
        if product is None:
            return False
        if b.chance(20):
            b.emit(f"{product}.to(f32)")
        x, columns = product, following
    return None


CORES = (foreach_cast,)
