"""What ``python -m fusebackend bench kernels`` times of this family: a table with goals, and random shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, size


def _added(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.index_add_(0, index, source)


def _fp32_by_inductor(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The same sum in fp32, which Inductor adds atomically in a kernel of its own, as a peer for 16-bit sums too."""
    x, source = x.float(), source.float()
    compiled = torch.compile(lambda x, index, source: x.index_add_(0, index, source))
    return lambda: compiled(x, index, source)


def cases() -> list[Case]:
    """``index_add_`` of few and of many rows, onto one row and onto many, deterministic, onto zeros.

    On a CPU the goals are fractions of Inductor's time.
    """

    def case(what: str, dtype: torch.dtype, shape: tuple[int, ...], n: int, goals: dict[str, float], one_row=False, zeros=False, **more):
        def inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            index = torch.full((n,), shape[0] // 2, device=device) if one_row else torch.randint(shape[0], (n,), device=device)
            return torch.randn(shape, device=device).to(dtype), index, torch.randn(n, *shape[1:], device=device).to(dtype)

        def onto_zeros(x, index, source):
            return torch.zeros_like(x).index_add_(0, index, source)

        name = f"{'fp32' if dtype is torch.float32 else 'bf16'} {what}"
        return Case(name, onto_zeros if zeros else _added, inputs, goals=goals, **more)

    f32, bf16 = torch.float32, torch.bfloat16
    if not torch.cuda.is_available():
        small = {
            "32768x256 <- 1024": ((32768, 256), 1024),
            "20000x64 <- 200000": ((20000, 64), 200000),
            "1-D 1Mi <- 100000": ((1 << 20,), 100000),
        }
        return [case(what, t, *sizes, {"inductor": 0.2 if "x" in what else 1.0}) for what, sizes in small.items() for t in (f32, bf16)]
    table = {  # shape, entries, and goals in ms for fp32 and bf16; None: Inductor's time in fp32
        "1-D 32Mi <- 15": ((1 << 25,), 15, None),
        "32Kix1024 <- 15": ((32768, 1024), 15, None),
        "32x1024x1024 <- 15": ((32, 1024, 1024), 15, (0.045, 0.025)),
        "1-D 32Mi <- 1024": ((1 << 25,), 1024, None),
        "32Kix1024 <- 1024": ((32768, 1024), 1024, (0.0065, 0.005)),
        "graph 100000x64 <- 1M": ((100_000, 64), 1_000_000, (0.11, 0.07)),
        "MoE combine 16384x4096 <- 4096": ((16384, 4096), 4096, (0.052, 0.028)),
        "hot 16x256 <- 262144": ((16, 256), 262_144, (0.080, 0.045)),
    }
    cases = []
    for what, (shape, n, goals) in table.items():
        for i, dtype in enumerate((f32, bf16)):
            if goals is None:
                cases.append(case(what, dtype, shape, n, {"inductor fp32": 1.0}, peers={"inductor fp32": _fp32_by_inductor}))
            else:
                cases.append(case(what, dtype, shape, n, {"ms": goals[i]}))
    return [
        *cases,
        case("graph, deterministic", f32, (100_000, 64), 1_000_000, {"ms": 0.30}, deterministic=True),
        case("zeros 50000x1024 <- 16384", bf16, (50_000, 1024), 16_384, {"ms": 0.06}, zeros=True),
        case("one of 2000x384 <- 713268 (pytorch#137425)", bf16, (2000, 384), 713_268, {"eager": 0.2, "inductor": 0.2}, one_row=True),
    ]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Sums of any size up to 512 MB times ``scale``: onto what is given, onto zeros, with a gathered source, or several by one index."""
    while True:
        kind, rows, columns, entries = draw.choice(list(FLOATS)), size(draw, 4, 2**20), size(draw, 1, 4096), size(draw, 8, 2**20)
        bytes_ = (rows + entries) * columns * FLOATS[kind].itemsize
        if bytes_ / scale > 2**29:
            continue
        gathers, zeros, sums = draw.random() < 0.3, draw.random() < 0.5, draw.choice([1, 1, 1, 1, 2, 3])

        def inputs(device, dtype=FLOATS[kind], rows=rows, columns=columns, entries=entries, gathers=gathers):
            x, index = torch.randn(rows, columns, device=device).to(dtype), torch.randint(rows, (entries,), device=device)
            if gathers:
                return x, index, torch.randint(rows, (entries,), device=device)
            return x, index, torch.randn(entries, columns, device=device).to(dtype)

        def fn(x, index, source, gathers=gathers, zeros=zeros, sums=sums):
            if sums > 1:  # as the layers of a graph network
                for _ in range(sums):
                    x = torch.zeros_like(x).index_add(0, index, x[source]) if gathers else x.index_add(0, index, source)
                return x
            source = x[source] if gathers else source
            return torch.zeros_like(x).index_add(0, index, source) if zeros or gathers else x.index_add_(0, index, source)

        what = f" {sums} sums" if sums > 1 else ""
        what += " gathered" if gathers else " onto zeros" if zeros and sums == 1 else ""
        yield Case(f"{kind} {rows}x{columns} <- {entries}{what}", fn, inputs)
