"""What ``python -m fusebackend bench kernels`` times of this family: attention that is written out, of models' sizes; and random shapes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, log_uniform, size
from fusebackend.patterns.sdpa.match import LEAST_KEYS_IN_FP32

#: The largest sizes of random cases, in scores and in elements of q.
_MOST_SCORES, _MOST_ELEMENTS = 2**32, 2**30


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Attention of q (batch, heads, tokens, D) with as many keys, behind a mask: "none", "causal", or "padding", of (batch, 1, 1, keys)."""

    q: tuple[int, int, int, int]
    mask: str
    dtype: torch.dtype

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        batch, heads, tokens, depth = self.q
        operands = [torch.randn(batch, tokens, heads, depth, device=device).to(self.dtype).transpose(1, 2) for _ in range(3)]
        if self.mask == "padding":
            operands.append(torch.where(torch.rand(batch, 1, 1, tokens, device=device) < 0.9, 0.0, -1e4).to(self.dtype))
        return tuple(operands)

    def fn(self, q, k, v, *masks):
        # Where sizes are dynamic, this makes that of a head a number, as it is in a model.
        if q.shape[-1] != self.q[-1]:
            raise ValueError(f"heads of {self.q[-1]} are expected, got {q.shape[-1]}")
        # Inductor looks for other spellings.
        scores = (q * self.q[-1] ** -0.5) @ k.transpose(-2, -1)
        if self.mask == "causal":
            hidden = torch.ones(scores.shape[-2], scores.shape[-1], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        for mask in masks:
            scores = mask + scores
        return torch.softmax(scores, -1) @ v

    def peer(self, q, k, v, *masks):
        return lambda: F.scaled_dot_product_attention(q, k, v, *masks, is_causal=self.mask == "causal")

    def case(self, name: str) -> Case:
        return Case(name, self.fn, self.inputs, peers={"SDPA": self.peer})


#: Name, (batch, heads, tokens, D) and mask.
_TABLE = (
    ("BERT 8x12x128x64", (8, 12, 128, 64), "padding"),
    ("ViT 8x12x197x64", (8, 12, 197, 64), "none"),
    ("GPT-2 4x12x512x64", (4, 12, 512, 64), "causal"),
    ("Llama 1x32x1024x128", (1, 32, 1024, 128), "causal"),
)


def cases() -> list[Case]:
    """Each shape in fp32 and bf16, beside SDPA."""
    return [_Shape(q, mask, FLOATS[kind]).case(f"{kind} {name}") for kind in ("fp32", "bf16") for name, q, mask in _TABLE]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Attention of a random shape and mask."""
    while True:
        heads, depth = draw.choice((1, 2, 4, 6, 8, 12, 16, 32)), draw.choice((16, 32, 48, 64, 64, 64, 80, 96, 128))
        tokens = draw.choice((49, 64, 128, 196, 197, 256, 512, 1024, size(draw, 8, 2048), size(draw, 8, 2048)))
        scores = scale * log_uniform(draw, 2**16 / scale, _MOST_SCORES)
        batch = max(1, round(scores / (heads * tokens * tokens)))
        if batch * heads * tokens * depth > scale * _MOST_ELEMENTS or batch * heads * tokens**2 > 2 * scale * _MOST_SCORES:
            continue
        kind = draw.choice(("fp32", "bf16", "fp16"))
        if kind == "fp32" and tokens < LEAST_KEYS_IN_FP32:
            continue
        shape = _Shape((batch, heads, tokens, depth), draw.choice(("none", "causal", "padding")), FLOATS[kind])
        yield shape.case(f"{kind} {batch}x{heads}x{tokens}x{depth} {shape.mask}")
