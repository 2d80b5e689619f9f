"""What ``python -m fusebackend bench kernels`` times of this family: attention of models, written out, with biases; and random shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from fusebackend.bench.case import Case
from fusebackend.bench.own_code import with_own_code
from fusebackend.bench.random_shapes import log_uniform, size
from fusebackend.patterns.row_scatter.bench import relative_positions

#: The largest sizes of random cases, in scores and in elements of q.
_MOST_SCORES, _MOST_ELEMENTS = 2**28, 2**27


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Attention: (batch..., heads, queries, D), the keys, the sizes of the biases, and which have a gradient. Inputs and result are
    (batch..., tokens, heads * D), as linear layers give and take them."""

    q: tuple[int, ...]
    keys: int
    biases: tuple[tuple[int, ...], ...]
    learned: tuple[bool, ...]
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        *batch, heads, queries, dim = self.q

        def tokens(count: int) -> torch.Tensor:
            return torch.randn(*batch, count, heads * dim, device=device).to(self.dtype)

        biases = [torch.randn(b, device=device).to(self.dtype) for b in self.biases]
        return tokens(queries), tokens(self.keys), tokens(self.keys), *biases

    def heads(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.unflatten(-1, (self.q[-3], self.q[-1])).transpose(-3, -2)

    def attention(self) -> Callable[..., torch.Tensor]:
        scale, causal = self.q[-1] ** -0.5, self.causal

        def fn(q, k, v, *biases):
            q, k, v = map(self.heads, (q, k, v))
            scores = q @ k.transpose(-2, -1) * scale
            for term in self.terms(q, k, *biases):
                scores = scores + term
            if causal:
                hidden = torch.ones(scores.shape[-2], scores.shape[-1], dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(hidden, -math.inf)
            return (torch.softmax(scores, -1) @ v).transpose(-3, -2).flatten(-2)

        return fn

    def terms(self, q: torch.Tensor, k: torch.Tensor, *biases: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is added to the scores, of the inputs behind q, k and v."""
        return biases

    def sdpa(self, q, k, v, *biases):
        """PyTorch's own kernels, on biases that were added up before. Their gradient is not asked for: these kernels may not have it."""
        total = sum(biases).expand(*self.q[:-1], self.keys).flatten(0, -4) if biases else None
        arguments = [self.heads(x).flatten(0, -4) for x in (q, k, v)]
        return lambda: F.scaled_dot_product_attention(*arguments, total)

    def flex_attention(self, q, k, v, *biases):
        """The same as ``attention``, by FlexAttention: a `score_mod` reads the biases where they lie."""
        batch = self.q[:-3]
        # A table that has a gradient may be indexed, and nothing else.
        tables = [(bias.squeeze(), [count > 1 for count in bias.shape]) for bias in biases]

        def add_biases(score, b, h, t, s):
            at = [h, t, s]
            for count in reversed(batch):
                at.insert(0, b % count)
                b = b // count
            for table, has in tables:
                score = score + table[tuple(itertools.compress(at, has))]
            return score

        q, k, v = (self.heads(x).flatten(0, -4) for x in (q, k, v))
        return flex_attention(q, k, v, score_mod=add_biases).transpose(-3, -2).flatten(-2).unflatten(0, batch)

    def flex_attention_peer(self, backward: bool) -> Callable[..., Callable[[], Any]]:
        """It compiled, without fallbacks. Where a release has no gradient of a bias, its error says so."""
        name = f"FlexAttention {self} {backward}"
        compiled = torch.compile(with_own_code(self.flex_attention, name), dynamic=False, fullgraph=True)

        def prepare(*arguments):
            if not backward:
                return functools.partial(compiled, *arguments)
            wanted = [arguments[i].requires_grad_() for i in self.gradients]
            out = compiled(*arguments)
            return functools.partial(torch.autograd.grad, out, wanted, torch.randn_like(out), retain_graph=True)

        return prepare

    @property
    def gradients(self) -> tuple[int, ...]:
        return (0, 1, 2, *(3 + i for i, learned in enumerate(self.learned) if learned))

    @property
    def flops(self) -> int:
        return 4 * math.prod(self.q) * self.keys


def _positions(tokens: int, buckets: int) -> torch.Tensor:
    return relative_positions(tokens, buckets // 2, max(tokens, buckets))


@dataclasses.dataclass(frozen=True)
class _Gathered(_Shape):
    """Attention with terms that are gathered from products with embeddings of relative positions (DeBERTa), one behind the other in memory
    for the keys of a query; and with biases. Of as many keys as queries.

    Attributes:
        to_position, from_position: whether products of queries with positions are added, and of positions with keys; their embeddings have
            gradients.
        buckets: of positions.
    """

    to_position: bool = True
    from_position: bool = True
    buckets: int = 64

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        embeddings = [torch.randn(self.q[-3], self.buckets, self.q[-1], device=device).to(self.dtype) for _ in range(self._embeddings)]
        return (*super().inputs(device), *embeddings, _positions(self.keys, self.buckets).to(device))

    def terms(self, q, k, *rest):
        *rest, index = rest
        biases, embeddings = rest[: len(self.biases)], rest[len(self.biases) :]
        index = index.expand(*q.shape[:-1], k.shape[-2])
        scale = self.q[-1] ** -0.5
        found = [torch.gather(q @ embeddings[0].mT, -1, index) * scale] if self.to_position else []
        found += [torch.gather(k @ embeddings[-1].mT, -1, index).mT * scale] if self.from_position else []
        return (sum(found[1:], found[0]), *biases)

    @property
    def _embeddings(self) -> int:
        return self.to_position + self.from_position

    @property
    def gradients(self) -> tuple[int, ...]:
        return (*super().gradients, *(3 + len(self.biases) + i for i in range(self._embeddings)))


@dataclasses.dataclass(frozen=True)
class _LookedUp(_Shape):
    """Attention with a bias of each head that is looked up in a table by relative position (T5, Swin), which has a gradient; and with
    biases."""

    buckets: int = 32

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        table = torch.randn(self.buckets, self.q[-3], device=device).to(self.dtype)
        return (*super().inputs(device), table, _positions(self.keys, self.buckets).to(device))

    def terms(self, q, k, *rest):
        *biases, table, index = rest
        return (table[index].permute(2, 0, 1), *biases)

    @property
    def gradients(self) -> tuple[int, ...]:
        return (*super().gradients, 3 + len(self.biases))


@dataclasses.dataclass(frozen=True)
class _ByPyTorch(_Shape):
    """Attention that a program hands to PyTorch, with one bias: where that needs a gradient, PyTorch takes its memory-efficient kernels on
    GPUs."""

    def attention(self) -> Callable[..., torch.Tensor]:
        def fn(q, k, v, bias):
            arguments = [self.heads(x) for x in (q, k, v)]
            return F.scaled_dot_product_attention(*arguments, bias.expand(*self.q[:-1], self.keys)).transpose(-3, -2).flatten(-2)

        return fn


#: Name, shape, and the goals of forward and backward in ms on an H200.
_TABLE = (
    ("Swin 49x32", _Shape((4096, 4, 49, 32), 49, ((1, 4, 49, 49),), (True,)), 0.10, 0.24),
    ("Swin shifted", _Shape((16, 64, 8, 49, 32), 49, ((1, 1, 8, 49, 49), (1, 64, 1, 49, 49)), (True, False)), 0.060, 0.14),
    ("T5 1024x64", _Shape((8, 12, 1024, 64), 1024, ((1, 12, 1024, 1024),), (True,)), 0.085, 0.30),
    ("masked 512x64", _Shape((16, 12, 512, 64), 512, ((1, 12, 512, 512), (16, 1, 1, 512)), (True, False)), 0.055, 0.18),
    ("triangle 256x32", _Shape((256, 4, 256, 32), 256, ((1, 4, 256, 256),), (True,)), 0.055, 0.16),
    ("BEiT 197x64", _Shape((64, 12, 197, 64), 197, ((1, 12, 197, 197),), (True,)), None, None),
)


def cases() -> list[Case]:
    """Forward and backward of each shape, beside FlexAttention, and forward beside SDPA; on a CPU smaller batches."""
    listed = []
    for name, shape, forward, backward in _TABLE:
        if not torch.cuda.is_available():
            shape = _fewer_heads(shape)
        goals = [{} if ms is None or not torch.cuda.is_available() else {"ms": ms} for ms in (forward, backward)]
        fn, flex = shape.attention(), [{"FlexAttention": shape.flex_attention_peer(b)} for b in (False, True)]
        listed.append(Case(f"{name} forward", fn, shape.inputs, goals=goals[0], peers={"SDPA": shape.sdpa} | flex[0], flops=shape.flops))
        listed.append(
            Case(f"{name} backward", fn, shape.inputs, goals=goals[1], peers=flex[1], backward=shape.gradients, flops=5 * shape.flops // 2)
        )
    return listed


def _fewer_heads(shape: _Shape) -> _Shape:
    batch = tuple(min(n, 2) for n in shape.q[:-3])
    biases = tuple((*(min(n, 2) for n in bias[:-3]), *bias[-3:]) for bias in shape.biases)
    return dataclasses.replace(shape, q=(*batch, *shape.q[-3:]), biases=biases)


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Forward or backward of attention of a random shape, with none to three biases of random broadcasting, with terms that are gathered
    or looked up by position, or handed to PyTorch with a bias."""
    while True:
        form = draw.random()
        drawn = _draw_by_position(draw, scale, form < 0.18) if form < 0.25 else _draw_biased(draw, scale)
        if drawn is None:
            continue
        name, shape = drawn
        if form > 0.85 and type(shape) is _Shape and len(shape.biases) == 1 and not shape.causal:
            name = f"{name}, by PyTorch"
            shape = _ByPyTorch(shape.q, shape.keys, shape.biases, (True,), shape.dtype)
        backward = draw.random() < 0.6
        name = f"{str(shape.dtype)[6:]} {'x'.join(map(str, shape.q))}, {shape.keys} keys, {name}"
        name += ", causal" * shape.causal + ", backward" * backward
        # Kernels are compiled for some sizes of a head and the scale is a number of the call: neither may be symbolic.
        yield Case(name, shape.attention(), shape.inputs, backward=shape.gradients if backward else (), static=True)


def _draw_biased(draw: random.Random, scale: float) -> tuple[str, _Shape] | None:
    heads, dim = draw.choice((1, 2, 3, 4, 6, 8, 12, 16)), draw.choice((16, 24, 32, 32, 48, 64, 64, 64, 96, 128))
    queries = draw.choice((49, 64, 144, 196, 197, 256, 512, 1024, size(draw, 8, 2048), size(draw, 8, 2048)))
    keys = queries if draw.random() < 0.8 else size(draw, 8, 2048)
    batch = _draw_batch(draw, scale, heads * queries * keys)
    if batch * heads * max(queries, keys) * dim > _MOST_ELEMENTS:
        return None
    whole = (batch, heads, queries, keys)
    biases = [
        tuple(draw.choice(((1, *whole[1:]), (batch, 1, 1, keys), (1, 1, *whole[2:]), whole)))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))
    ]
    learned = tuple(i == 0 and draw.random() < 0.7 for i in range(len(biases)))
    shape = _Shape((batch, heads, queries, dim), keys, tuple(biases), learned, _draw_dtype(draw), draw.random() < 0.15 and queries == keys)
    return f"biases {' '.join('x'.join(map(str, bias)) for bias in biases) or 'none'}", shape


def _draw_by_position(draw: random.Random, scale: float, gathers: bool) -> tuple[str, _Shape] | None:
    heads, dim = draw.choice((4, 6, 8, 12, 16)), draw.choice((32, 64, 64))
    tokens = draw.choice((64, 128, 196, 256, 384, 512, 512, 1024, size(draw, 64, 1024)))
    buckets = draw.choice((32, 64, 128, 256, 512, 512))
    batch = _draw_batch(draw, scale, heads * tokens * max(tokens, buckets if gathers else 0))
    if batch * heads * tokens * max(dim, buckets if gathers else 0) > (_MOST_SCORES if gathers else _MOST_ELEMENTS):
        return None
    biases = ((batch, 1, 1, tokens),) if draw.random() < 0.4 else ()  # a mask
    common = ((batch, heads, tokens, dim), tokens, biases, (False,) * len(biases), _draw_dtype(draw))
    masked = ", masked" * len(biases)
    if not gathers:
        return f"a bias of {buckets} positions{masked}", _LookedUp(*common, buckets=buckets)
    sides = draw.choice(((True, True), (True, True), (True, False), (False, True)))
    of = " and ".join(itertools.compress(("c2p", "p2c"), sides))
    return f"{of} of {buckets} positions{masked}", _Gathered(*common, to_position=sides[0], from_position=sides[1], buckets=buckets)


def _draw_batch(draw: random.Random, scale: float, scores: int) -> int:
    """For so many scores of a batch of one."""
    return max(1, round(min(scale, 1) * log_uniform(draw, 2**16, _MOST_SCORES) / scores))


def _draw_dtype(draw: random.Random) -> torch.dtype:
    return draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
