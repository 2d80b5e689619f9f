"""Random sums of products by broadcasting, of rank 2 to 7: factors, their strides and dtypes, and the dims that are summed."""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusebackend.patterns.contraction.match import Contraction
from fusebackend.rewriting import apply

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_PRODUCTS = 30_000


@dataclasses.dataclass
class Drawn:
    """``sum(x * y)`` along ``dims``; ``kinds`` says of each dim of the product whose it is.

    ``holders`` are contiguous tensors of the factors' dims in the order of memory; ``orders`` bring them into the product's order.
    """

    kinds: list[str]
    sizes: list[int]
    dims: tuple[int, ...]
    keepdim: bool
    mean: bool
    expanded: bool
    orders: list[list[int]]
    dtypes: list[torch.dtype]
    out: torch.dtype | None

    OWN = ({"batch", "left", "summed"}, {"batch", "right", "summed"})

    def holders(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn([self.sizes[d] for d in order], generator=generator).to(dtype) for order, dtype in zip(self.orders, self.dtypes)
        ]

    def factors(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for holder, order, own in zip((x, y), self.orders, self.OWN):
            factor = holder.permute([order.index(d) for d in sorted(order)])
            for d, kind in enumerate(self.kinds):
                if kind not in own:
                    factor = factor.unsqueeze(d)
            if self.expanded:
                factor = factor.expand([1 if kind == "repeated" else n for kind, n in zip(self.kinds, self.sizes)])
            found.append(factor)
        return found

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = self.factors(x, y)
        product = x * y
        if self.mean:
            return product.mean(self.dims, keepdim=self.keepdim)
        return product.sum(self.dims, keepdim=self.keepdim, dtype=self.out)


def draw(seed: int) -> Drawn:
    chance = random.Random(seed)
    while True:
        rank = chance.randint(2, 7)
        kinds = ["left", "right", "summed"] + [chance.choice(["batch", "left", "right", "summed"]) for _ in range(rank - 3)]
        if rank == 2:
            kinds = ["left", "summed"]  # of rank 2 there is none
        chance.shuffle(kinds)
        sizes = [chance.choice([1, 2, 3, 5, 8, 13, 17, 32]) for _ in kinds]
        if math.prod(sizes) <= MOST_PRODUCTS:
            break
    dims = [d for d, kind in enumerate(kinds) if kind == "summed"]
    negative = chance.random() < 0.3
    orders = []
    for own in Drawn.OWN:
        order = [d for d, kind in enumerate(kinds) if kind in own]
        if chance.random() < 0.5:
            chance.shuffle(order)
        orders.append(order)
    dtype = chance.choice(DTYPES)
    other = chance.choice(DTYPES) if chance.random() < 0.1 else dtype
    out = torch.float32 if chance.random() < 0.1 and torch.promote_types(dtype, other) != torch.float64 else None
    return Drawn(
        kinds,
        sizes,
        tuple(d - len(kinds) for d in dims) if negative else tuple(dims),
        chance.random() < 0.3,
        chance.random() < 0.15,
        chance.random() < 0.3,
        orders,
        [dtype, other],
        out,
    )


def traced(fn, *args):
    """The graph of ``fn`` after Inductor's decompositions."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) for a in args]
    with mode:
        return make_fx(fn, decomposition_table=select_decomp_table())(*fakes)


def rewritten(fn, *args):
    """The traced ``fn`` after every legal match was applied, as with the gate off, and the outcome."""
    module = traced(fn, *args)
    outcome = apply.rewrite(module.graph, [Contraction()], "forward", strict=True)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module, outcome


def calls(graph, *targets):
    return [n for n in graph.nodes if n.target in targets]
