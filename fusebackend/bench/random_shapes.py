"""Random shapes of the families' own operations: whether a substitution is ever slower shows at sizes that nobody chose.

Sizes are log-uniform, limited by the bytes that are moved and by what PyTorch's kernel takes.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case

_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cases(family: str, count: int, seed: int) -> list[Case]:
    """``count`` cases of a family of :data:`FAMILIES`; the same for the same seed, on a GPU or without one."""
    found: dict[str, Case] = {}
    drawn = FAMILIES[family](random.Random(seed), 1.0 if torch.cuda.is_available() else 1 / 64)
    while len(found) < count:
        case = next(drawn)
        found.setdefault(case.name, case)
    return list(found.values())


def _size(draw: random.Random, low: float, high: float) -> int:
    """Log-uniform; every other one is a multiple of the largest power of two that is no more than an eighth of it."""
    size = math.exp(draw.uniform(math.log(low), math.log(high)))
    step = 2 ** int(math.log2(size / 8)) if size >= 16 and draw.random() < 0.5 else 1
    return max(1, round(size / step) * step)


def _transposed_sums(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        kind, rank = draw.choice(list(_FLOATS)), draw.randint(2, 4)
        shape = [_size(draw, 2, 8192) for _ in range(rank)]
        order = draw.sample(range(rank), rank)
        if order == sorted(order) or not 2**20 <= math.prod(shape) * _FLOATS[kind].itemsize / scale <= 2**28:
            continue

        def inputs(device, dtype=_FLOATS[kind], shape=tuple(shape), order=tuple(order)):
            x = torch.randn(shape, device=device).to(dtype)
            return x, torch.randn([shape[d] for d in order], device=device).to(dtype)

        def fn(x, y, order=tuple(order)):
            return x.permute(order) + y

        yield Case(f"{kind} {'x'.join(map(str, shape))} ({','.join(map(str, order))})", fn, inputs, lambda x, y: x.view(y.shape) + y)


def permutations(draw: random.Random, scale: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Shapes of rank 2 to 5, 16 to 96 MB (1 MB without a GPU), sizes log-uniform, each with an order and a dtype's key."""
    low, high = (16 << 20, 96 << 20) if scale == 1 else (1 << 20, 2 << 20)
    while True:
        rank, kind = draw.randint(2, 5), draw.choice(["fp16", "fp32"])
        total = math.exp(draw.uniform(math.log(low), math.log(high))) / _FLOATS[kind].itemsize
        cuts = [0, *sorted(draw.random() for _ in range(rank - 1)), 1]
        shape = tuple(max(2, round(total ** (b - a))) for a, b in zip(cuts, cuts[1:]))
        permutation = tuple(draw.sample(range(rank), rank))
        if permutation != tuple(range(rank)) and low <= math.prod(shape) * _FLOATS[kind].itemsize <= 2 * high:
            yield shape, permutation, kind


def _permutes(draw: random.Random, scale: float) -> Iterator[Case]:
    for shape, permutation, kind in permutations(draw, scale):

        def inputs(device, dtype=_FLOATS[kind], shape=shape):
            return (torch.randn(shape, device=device, dtype=dtype),)

        def fn(x, permutation=permutation):
            return x.permute(permutation).contiguous()

        def kernel(x, permutation=permutation):  # where Inductor's copy stays, ours is timed too
            return functools.partial(torch.ops.fusebackend.permute_copy, x.permute(permutation), list(range(x.dim())))

        name = f"{kind} {'x'.join(map(str, shape))} ({''.join(map(str, permutation))})"
        yield Case(name, fn, inputs, lambda x: x.clone(), peers={"kernel": kernel})


def _index_sums(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        kind, rows, columns, entries = draw.choice(list(_FLOATS)), _size(draw, 4, 2**20), _size(draw, 1, 4096), _size(draw, 8, 2**20)
        bytes_ = (rows + entries) * columns * _FLOATS[kind].itemsize
        if bytes_ / scale > 2**29:
            continue
        gathers, zeros = draw.random() < 0.3, draw.random() < 0.5

        def inputs(device, dtype=_FLOATS[kind], rows=rows, columns=columns, entries=entries, gathers=gathers):
            x, index = torch.randn(rows, columns, device=device).to(dtype), torch.randint(rows, (entries,), device=device)
            if gathers:
                return x, index, torch.randint(rows, (entries,), device=device)
            return x, index, torch.randn(entries, columns, device=device).to(dtype)

        def fn(x, index, source, gathers=gathers, zeros=zeros):
            source = x[source] if gathers else source
            return torch.zeros_like(x).index_add(0, index, source) if zeros or gathers else x.index_add_(0, index, source)

        what = " gathered" if gathers else " onto zeros" if zeros else ""
        yield Case(f"{kind} {rows}x{columns} <- {entries}{what}", fn, inputs)


def _convolutions(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        kind, batch, channels, length = draw.choice(list(_FLOATS)), _size(draw, 1, 64), _size(draw, 4, 8192), _size(draw, 16, 8192)
        taps = min(draw.choice([2, 3, 4, 4, 4, 5, 7, 9, 16, 31, 64, 128, length]), length)
        elements = batch * channels * length / scale
        if not 2**16 <= elements <= 2**26 or elements * taps > 2**34:
            continue
        last, silu, backward = draw.random() < 0.3, draw.random() < 0.5, draw.random() < 0.5

        def inputs(device, dtype=_FLOATS[kind], batch=batch, channels=channels, length=length, taps=taps, last=last):
            shape = (batch, length, channels) if last else (batch, channels, length)
            x = torch.randn(shape, device=device).to(dtype)
            weight = torch.nn.Parameter((torch.randn(channels, 1, taps, device=device) / taps**0.5).to(dtype))
            return x.transpose(1, 2) if last else x, weight, torch.nn.Parameter(torch.randn(channels, device=device).to(dtype))

        def fn(x, weight, bias, silu=silu):
            y = F.conv1d(F.pad(x, (weight.shape[2] - 1, 0)), weight, bias, groups=weight.shape[0])
            return F.silu(y) if silu else y

        what = f"{kind} B{batch} C{channels} T{length} K{taps}{' (B, T, C)' if last else ''}{' silu' if silu else ''}"
        yield Case(f"{what}, {'backward' if backward else 'forward'}", fn, inputs, backward=(0, 1, 2) if backward else ())


def _products(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        m, n, k = (_size(draw, 16, 2**15) for _ in range(3))
        batch = draw.choice([0, 0, 0, _size(draw, 2, 64)])
        flops, elements = 2 * max(batch, 1) * m * n * k / scale, max(batch, 1) * (m * k + k * n + m * n) / scale
        if not 2**28 <= flops <= 2**40 or elements > 2**28:
            continue
        orders = draw.choice("rc"), draw.choice("rc")

        def inputs(device, m=m, n=n, k=k, batch=batch, orders=orders):
            def matrix(rows, columns, order):
                shape = [batch] * bool(batch)
                if order == "r":
                    return torch.randn(*shape, rows, columns, device=device)
                return torch.randn(*shape, columns, rows, device=device).mT

            return matrix(m, k, orders[0]), matrix(k, n, orders[1])

        yield Case(f"{f'{batch}x' if batch else ''}{m}x{n}x{k} {''.join(orders)}", torch.matmul, inputs, torch.matmul)


FAMILIES: dict[str, Callable[[random.Random, float], Iterator[Case]]] = {
    "permute": _permutes,
    "transpose_add": _transposed_sums,
    "index_add": _index_sums,
    "causal_conv1d": _convolutions,
    "fp32_matmul": _products,
}
