"""What ``python -m fusebackend bench kernels`` times of this family: gradients of biases and norms, gathered products, random sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, size, tensor

_CUDA, _CPU = (800_000, 50_000), (20_000, 2_000)  # edges and nodes of a graph


def attention_logits(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What a graph's edges contribute, as GATv2 computes it, summed over the edges: (nodes, heads, channels) -> (heads, channels)."""
    return (torch.nn.functional.leaky_relu(x[i] + x[j]) * w).sum(0)


def cases() -> list[Case]:
    """The floor of a plain sum is half of a copy, which moves the bytes twice."""
    cuda = torch.cuda.is_available()
    edges, nodes = _CUDA if cuda else _CPU

    def plain(name: str, kind: str, shape: tuple[int, ...], fn: Callable, goals: dict[str, float]) -> Case:
        def inputs(device: torch.device):
            return (tensor(shape, FLOATS[kind], device),)

        return Case(f"{kind} {name} {'x'.join(map(str, shape))}", fn, inputs, goals=goals if cuda else {})

    def gathered(device: torch.device):
        x, w = torch.randn(nodes, 4, 32, device=device).bfloat16(), torch.randn(4, 32, device=device).bfloat16()
        return x, *torch.randint(nodes, (2, edges), device=device), w

    def weight_gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (g.float() * x.float()).sum((0, 1))

    def norm_gradients(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (g.float() * x.float()).sum((0, 1)), g.float().sum((0, 1))

    def pair(device: torch.device):
        shape = (8, 2048, 1024) if cuda else (4, 64, 256)
        return tuple(torch.randn(shape, device=device).bfloat16() for _ in range(2))

    few = 1 if cuda else 16  # times fewer rows
    return [
        Case("bf16 gathered products", attention_logits, gathered, goals={"ms": 0.17} if cuda else {}),
        plain("sum(0)", "bf16", (edges, 128), lambda y: y.sum(0), {"ms": 0.052}),
        plain("sum(0)", "fp32", (edges, 128), lambda y: y.sum(0), {"inductor": 1.0}),
        plain("sum(0)", "bf16", (8192 // few, 3072), lambda y: y.sum(0), {"inductor": 1.0}),
        plain("sum((0,2,3)) NHWC", "bf16", (128 // few, 56, 56, 96), lambda y: y.permute(0, 3, 1, 2).sum((0, 2, 3)), {"inductor": 1.0}),
        plain("mean(1)", "bf16", (64 // few, 1024, 768), lambda y: y.mean(1), {"inductor": 1.0}),
        Case("bf16 products", weight_gradient, pair),
        Case("bf16 products and a factor", norm_gradients, pair),
        plain("x and x * x", "fp32", (edges, 128), lambda y: (y.sum(0), (y * y).sum(0)), {}),
        plain("x and x * x", "bf16", (edges, 128), lambda y: (y.sum(0), (y * y).sum(0)), {}),
        plain("sum(0) and sum((0,1))", "bf16", (64 // few, 1024, 768), lambda y: (y.sum(0), y.sum((0, 1))), {"inductor": 1.0}),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Sums and means of tensors that are there, of products, by themselves and with the sum of a factor, and of gathered rows, of one
    tensor or of pairs as GATv2 has them; up to two dims outside and two inside."""
    while True:
        kind, form = draw.choice(list(FLOATS)), draw.choice(("tensor", "tensor", "tensor", "product", "both", "gathered", "pairs"))
        dtype = FLOATS[kind]
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / dtype.itemsize
        columns = size(draw, 2, min(8192, elements / 8))
        batch = size(draw, 2, 64) if form == "tensor" and draw.random() < 0.25 else 1
        rows = max(2, round(elements / columns / batch))
        if not LEAST_BYTES * min(scale, 1) <= rows * columns * batch * dtype.itemsize <= MOST_BYTES * scale:
            continue
        shape = (rows, columns) if batch == 1 else (batch, rows, columns)
        mean = draw.random() < 0.2
        nodes = max(2, round(rows / log_uniform(draw, 1, 64)))
        yield _case(f"{kind} {'x'.join(map(str, shape))} {'mean' if mean else 'sum'} of a {form}", form, shape, dtype, mean, nodes)


def _case(name: str, form: str, shape: tuple[int, ...], dtype: torch.dtype, mean: bool, nodes: int) -> Case:
    dim = len(shape) - 2

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim) if mean else x.sum(dim)

    if form == "tensor":
        return Case(name, reduced, lambda device: (tensor(shape, dtype, device),))
    if form == "product":
        return Case(name, lambda x, y: reduced(x * y), lambda device: (tensor(shape, dtype, device), tensor(shape, dtype, device)))

    if form == "both":

        def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return reduced(x), reduced(x * y)

        return Case(name, both, lambda device: (tensor(shape, dtype, device), tensor(shape, dtype, device)))

    def gathered(device: torch.device):
        index = torch.randint(nodes, (shape[0],), device=device)
        return tensor((nodes, shape[1]), dtype, device), index, tensor(shape[1:], dtype, device)

    if form == "pairs":

        def pairs(device: torch.device):
            x, i, w = gathered(device)
            return x, i, torch.randint(nodes, (shape[0],), device=device), w

        return Case(f"{name} of {nodes} rows", lambda x, i, j, w: reduced(torch.nn.functional.leaky_relu(x[i] + x[j]) * w), pairs)
    return Case(f"{name} of {nodes} rows", lambda x, i, w: reduced(torch.relu(x[i]) * w), gathered)
