"""Random attentions: spellings, layouts, biases, masks, dtypes and sizes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import torch

SPECIAL = (0.0, 1.0, -1.0)


@dataclasses.dataclass
class Drawn:
    """``fn(*args)`` is one attention; ``says`` how it is written."""

    fn: Callable
    args: tuple
    training: bool
    says: str


class _Draw:
    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.says: list[str] = []
        torch.manual_seed(seed)

    def pick(self, what: str, *options):
        found = self.random.choice(options)
        self.says.append(f"{what}={found}")
        return found


def draw(seed: int) -> Drawn:
    d = _Draw(seed)
    dtype = d.pick("dtype", torch.bfloat16, torch.bfloat16, torch.float16)
    training = d.pick("training", False, True, True)
    batch = d.pick("batch", (2, 3), (2, 3), (3, 2), (4, 1), (1, 4), (3,), (2, 2, 3), ())
    queries, keys = d.pick("T", 2, 5, 9, 16, 33, 49), d.pick("S", 2, 5, 9, 16, 33, 49)
    depth, width = d.pick("D", 8, 16, 32, 64), d.pick("Dv", 16, 16, 8, 32)
    if len(batch) < 3 and d.random.random() < 0.5:
        keys = queries
    layout = d.pick("layout", "rows", "tokens", "transposed") if len(batch) > 1 else "rows"
    operands = [_operand(d, layout, batch, n, c, dtype) for n, c in ((queries, depth), (keys, depth), (keys, width))]
    parts = _scale(d, depth)
    product = d.pick("product", "@", "einsum", "bmm", "keys first", "broadcast", "baddbmm")
    softmax = d.pick("softmax", "plain", "float", "dtype", "plain") if training else d.pick("softmax", "plain", "float", "written", "dtype")
    out = d.pick("out", "plain", "tokens", "einsum", "values first")
    terms = [_term(d, batch, queries, keys, dtype, training) for _ in range(d.pick("terms", 0, 1, 1, 2, 2, 3))]
    finite = [i for i, t in enumerate(terms) if t[0] == "where" and t[1] != -math.inf]
    if finite and (len(terms) > 1):  # refused beside others; what is left is tested alone
        terms = [terms[finite[0]]]
    drops = d.pick("dropout", False, False, False, True)
    kept = [torch.rand(*batch, queries, keys) < 0.8] if drops else []
    args = (*operands, *(t[2] for t in terms), *kept)

    def fn(q, k, v, *given):
        q, k, v = (_laid_out(layout, x) for x in (q, k, v))
        q, k = (q * parts[0] if parts[0] != 1 else q), (k / parts[1] if parts[1] != 1 else k)
        scores = _product(product, q, k)
        if parts[2] != 1:
            scores = scores * parts[2]
        if parts[3] != 1:
            scores = scores / parts[3]
        for (kind, number, _), x in zip(terms, given):
            if kind == "added":
                scores = scores + x
            elif kind == "before":
                scores = x + scores
            elif kind == "subtracted":
                scores = scores - x
            elif kind == "alpha":
                scores = torch.add(scores, x, alpha=number)
            elif kind == "chosen":
                scores = scores + torch.where(x, 0.0, number)
            elif kind == "causal":
                rows, columns = map(torch.arange, scores.shape[-2:])
                scores = scores + torch.where(columns[None] <= rows[:, None], 0.0, number)
            elif kind == "where":
                scores = torch.where(x, scores, number)
            else:
                scores = scores.masked_fill(~x, number)
        if softmax == "plain":
            p = scores.softmax(-1)
        elif softmax == "float":
            p = (scores.float() if scores.dtype != torch.float64 else scores).softmax(-1)
        elif softmax == "dtype":
            p = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
        else:
            p = (scores - scores.amax(-1, keepdim=True)).exp()
            p = p / p.sum(-1, keepdim=True)
        p = p.to(v.dtype)
        if drops:
            p = p * given[-1] * 1.25
        if out == "values first":
            return (v.mT @ p.mT).mT
        if out == "einsum":
            return torch.einsum("...ts,...sd->...td", p, v)
        y = p @ v
        return y.transpose(-3, -2).flatten(-2) if out == "tokens" and y.dim() > 2 else y

    return Drawn(fn, args, training, ", ".join(d.says))


def _operand(d: _Draw, layout: str, batch: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (*batch, rows, columns)
    if layout == "tokens":
        shape = (*batch[:-1], rows, batch[-1], columns)
    elif layout == "transposed":
        shape = (*batch, columns, rows)
    return torch.randn(shape).to(dtype).requires_grad_()


def _laid_out(layout: str, x: torch.Tensor) -> torch.Tensor:
    return x if layout == "rows" else x.transpose(-3, -2) if layout == "tokens" else x.mT


def _scale(d: _Draw, depth: int) -> tuple[float, float, float, float]:
    """What queries are multiplied by, keys divided by, scores multiplied and divided by: 1 / sqrt(depth) in all."""
    root = math.sqrt(depth)
    kind = d.pick("scale", "queries", "keys", "scores", "divided", "two roots", "mixed")
    return {
        "queries": (1 / root, 1.0, 1.0, 1.0),
        "keys": (1.0, root, 1.0, 1.0),
        "scores": (1.0, 1.0, 1 / root, 1.0),
        "divided": (1.0, 1.0, 1.0, root),
        "two roots": (depth**-0.25, depth**0.25, 1.0, 1.0),
        "mixed": (0.5, 1.0, 2 / root, 1.0),
    }[kind]


def _product(kind: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if kind == "einsum":
        return torch.einsum("...td,...sd->...ts", q, k)
    if kind == "keys first":
        return (k @ q.mT).mT
    if kind in ("bmm", "baddbmm"):
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k)]
        if kind == "bmm":
            scores = torch.bmm(flat[0], flat[1].mT)
        else:
            nothing = torch.zeros(1, 1, 1, dtype=q.dtype)
            scores = torch.baddbmm(nothing, flat[0], flat[1].mT, beta=0, alpha=1.0)
        return scores.view(*q.shape[:-1], k.shape[-2])
    return q.matmul(k.transpose(-2, -1))


def _term(d: _Draw, batch: tuple[int, ...], queries: int, keys: int, dtype: torch.dtype, training: bool):
    """(kind, number, tensor) of a bias or mask."""
    shape = [n if d.random.random() < 0.5 else 1 for n in (*batch, queries)] + [keys]
    while len(shape) > 1 and shape[0] == 1 and d.random.random() < 0.5:
        shape = shape[1:]
    kind = d.pick("term", "added", "before", "subtracted", "alpha", "mask added", "chosen", "causal", "where", "filled")
    d.says.append(f"{tuple(shape)}")
    if kind in ("added", "before", "subtracted", "alpha"):
        held = d.pick("held", dtype, dtype, torch.float32)
        return kind, 0.5, torch.randn(shape).to(held).requires_grad_(d.pick("learned", True, True, False))
    seen = torch.rand(shape) < 0.7
    if d.pick("causal", False, False, True) and queries == keys:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril()
    seen[..., 0] = True
    lowest = torch.finfo(dtype).min
    if kind in ("chosen", "causal"):  # as transformers makes masks, in fp32
        if kind == "chosen" and d.random.random() < 0.3 and seen.dim() > 1:
            seen[..., :1, :] = False
        return kind, d.pick("fill", torch.finfo(torch.float32).min, *[-math.inf] * bool(seen.any(-1).all())), seen
    if kind == "mask added":
        return "added", 0.0, torch.zeros(seen.shape).masked_fill(~seen, d.pick("fill", -math.inf, lowest / 2, -100.0)).to(dtype)
    fill = d.pick("fill", -math.inf, -math.inf, lowest)
    if d.random.random() < 0.3 and fill == lowest and dtype == torch.bfloat16 and seen.dim() > 1:
        seen[..., :1, :] = False  # rows that are hidden wholly
    return kind, fill, seen
