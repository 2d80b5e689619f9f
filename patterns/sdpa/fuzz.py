"""What the fuzzer draws for this family: attention without a bias that learns, of any dtype, with masks, some of which hide rows wholly."""

from __future__ import annotations

import math

import torch

from fusebackend.fuzz.builder import Builder


def sdpa(b: Builder) -> bool | None:
    """``softmax(q @ k.mT * scale + mask) @ v``.

    Not of infinities and NaN: a mask that is added does not hide them, and ``where`` does.
    """
    if not b.dtype.is_floating_point or b.special or b.dtype == torch.float64:
        return False
    batch, heads, depth = b.pick((2, 1, 3)), b.pick((2, 3, 1)), b.pick((16, 8, 5, 32))
    queries = b.pick((5, 9, 33, 17))
    keys = queries if b.chance(60) else b.pick((4, 12, 40))
    q = b.operand((batch, queries, heads, depth), b.dtype)
    k, v = (b.operand((batch, keys, heads, depth), b.dtype) for _ in range(2))
    q, k, v = (b.emit(f"{x}.transpose(1, 2)", moves=True) or x for x in (q, k, v))
    root = math.sqrt(depth)
    scores = b.emit(
        b.pick((f"({q} * {1 / root}) @ {k}.mT", f"{q} @ {k}.mT / {root}", f"torch.matmul({q}, {k}.transpose(2, 3)) * {1 / root}"))
    )
    if scores is None:
        return False
    kind = b.integer(0, 4)
    if kind in (1, 2):
        hidden = b.emit(f"torch.ones({queries}, {keys}, dtype=torch.bool).triu({b.pick(('1', '1', '0', '3'))})")
        fill = b.pick(("torch.finfo(torch.float32).min", "-float('inf')", "-1e9"))
        if hidden is not None:
            spelling = b.pick(
                (f"{scores}.masked_fill({hidden}, {fill})", f"{scores} + torch.where({hidden}, {fill}, 0.0).to({scores}.dtype)")
            )
            scores = b.emit(spelling) or scores
    elif kind > 2:
        mask = b.operand((batch, 1, b.pick((1, queries)), keys), b.dtype)
        seen = b.emit(f"torch.where({mask} > {b.pick(('1.0', '2.0', '-1.0'))}, torch.finfo({b.dtype}).min, 0.0).to({mask}.dtype)")
        if seen is not None:
            scores = b.emit(f"{scores} + {seen}") or scores
    p = b.emit(b.pick((f"{scores}.softmax(-1)", f"F.softmax({scores}, dim=-1, dtype=f32).to({v}.dtype)")))
    if p is None:
        return False
    y = b.emit(f"{p} @ {v}")
    if y is not None and b.chance(50):
        b.emit(f"{y}.transpose(1, 2).flatten(-2)")


CORES = (sdpa,)
