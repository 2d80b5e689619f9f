"""What the fuzzer draws for this family: attention in the spellings that users write, with biases and masks, and near misses."""

from __future__ import annotations

import math

import torch

from fusebackend.fuzz.builder import Builder

_HALVES = (torch.bfloat16, torch.float16)


def attention(b: Builder) -> bool | None:
    """``softmax(q @ k.mT * scale + biases) @ v``, or with dropout.

    Not of infinities and NaN: a mask that is added does not hide them, and ``where`` does.
    """
    if not b.dtype.is_floating_point or b.special or b.dtype == torch.float64:
        return False
    dtype = b.dtype if b.chance(8) else b.dtype if b.dtype in _HALVES else b.pick(_HALVES)
    batch = tuple(b.pick((2, 3, 1, 4)) for _ in range(b.pick((2, 2, 1, 3, 0))))
    queries, keys = b.pick((5, 9, 4, 17, 2)), b.pick((5, 9, 4, 17, 3))
    depth, width = b.pick((16, 8, 16, 32, 20)), b.pick((16, 16, 8, 6))
    if b.chance(50):
        keys, width = queries, depth
    q, k, v = (_operand(b, batch, rows, columns, dtype) for rows, columns in ((queries, depth), (keys, depth), (keys, width)))
    root = math.sqrt(depth)
    scaled = b.integer(0, 5)
    if scaled == 0:
        q = b.emit(f"{q} * {1 / root}") or q
    elif scaled == 1:
        k = b.emit(f"{k} / {root}") or k
    elif scaled == 2:
        q, k = b.emit(f"{q} * {depth**-0.25}") or q, b.emit(f"{k} * {depth**-0.25}") or k
    scores = b.emit(b.pick((f"{q} @ {k}.transpose(-2, -1)", f"torch.einsum('...td,...sd->...ts', {q}, {k})", f"({k} @ {q}.mT).mT")))
    if scores is None:
        return False
    if scaled > 2:
        scores = b.emit(b.pick((f"{scores} * {1 / root}", f"{scores} / {root}"))) or scores
    if b.chance(10):  # a scale of each head
        scores = b.emit(f"{scores} * {b.operand((*batch[-1:], 1, 1), dtype)}") or scores
    if b.chance(10):
        scores = b.emit(f"{scores} {b.pick(('- 9990', '+ 7', '- 0.5'))}") or scores
    for _ in range(b.pick((1, 0, 1, 2, 3))):
        scores = _with_term(b, scores, (*batch, queries, keys), dtype) or scores
    if b.chance(4):
        b.emit(f"{scores} + 1")
    p = b.emit(
        b.pick(
            (
                f"{scores}.softmax(-1)",
                f"F.softmax({scores}.to(f32), dim=-1).type_as({v})",
                f"torch.softmax({scores}, -1, dtype=f32).to({v}.dtype)",
            )
        )
    )
    if p is None:
        return
    if b.chance(5):
        p = b.emit(b.pick((f"{p} * 2", f"{p} + 1", f"{p}.relu()"))) or p
    if b.chance(15):  # dropout by a mask that is given: eager mode and compiled code draw other random numbers
        drawn = b.operand((*batch, queries, keys), dtype)
        mask = b.emit(f"{drawn} > {b.pick(('-1.0', '0', '-100.0'))}")
        if mask is not None:
            p = b.emit(b.pick((f"{p} * {mask} * 1.25", f"{p} * ({mask}.to({p}.dtype) / 0.8)", f"{mask} * {p} / 0.8"))) or p
    if queries == keys and b.chance(8):  # summed over the queries
        b.emit(f"{p}.mT @ {v}")
        return
    y = b.emit(b.pick((f"{p} @ {v}", f"torch.einsum('...ts,...sd->...td', {p}, {v})", f"({v}.mT @ {p}.mT).mT")))
    if y is not None and len(batch) > 1 and b.chance(50):
        b.emit(f"{y}.transpose(-3, -2).flatten(-2)")


def _operand(b: Builder, batch: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> str:
    """(…, rows, columns), or a view of what has heads inside of tokens."""
    if len(batch) > 1 and b.chance(40):
        x = b.operand((*batch[:-1], rows, batch[-1], columns), dtype)
        return b.emit(f"{x}.transpose(-3, -2)", moves=True) or x
    return b.operand((*batch, rows, columns), dtype)


def _with_term(b: Builder, scores: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """The scores with a bias or a mask, of some of their dims."""
    sizes = [n if b.chance(50) else 1 for n in shape[:-1]] + [shape[-1]]
    drop = b.integer(0, len(sizes) - 1)
    sizes = sizes[drop:] if all(n == 1 for n in sizes[:drop]) else sizes
    kind = b.integer(0, 5)
    bias = b.operand(tuple(sizes), torch.float32 if b.chance(20) and kind == 0 else dtype)
    if kind <= 2:
        return b.emit(b.pick((f"{scores} + {bias}", f"{bias} + {scores}", f"{scores} - {bias}", f"{scores} + 0.5 * {bias}")))
    if kind == 3:
        hidden = b.emit(f"torch.ones({shape[-2]}, {shape[-1]}, dtype=torch.bool).triu(1)")
    else:
        hidden = b.emit(f"{bias} > {b.pick(('1.5', '0.5', '3'))}")
    if hidden is None:
        return None
    fill = b.pick(("torch.finfo(torch.bfloat16).min", "-1e9", "-100.0", "-30000.0", "-9500.0"))
    return b.emit(
        b.pick((f"{scores}.masked_fill({hidden}, {fill})", f"torch.where({hidden}, {fill}, {scores})", f"{scores} + {hidden} * -1000.0"))
    )


CORES = (attention,)
