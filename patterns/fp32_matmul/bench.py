"""What ``python -m fusebackend bench kernels`` times of this family: square products, those of models in training, random shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import size
from fusebackend.patterns.fp32_matmul.match import LEAST_K, asks_for_fp32

#: Model products of at least so many operations, with no side below ``MIN_SIDE`` and legal ``k``, are to be faster than cuBLAS: smaller
#: ones are a matter of launches, and thinner ones of bytes.
MIN_FLOPS, MIN_SIDE = 6e9, 256

#: Linear layers of three models: rows of the activations, and (inputs, outputs) of each layer.
LAYERS: dict[str, list[tuple[int, list[tuple[int, int]]]]] = {
    "gpt2 head": [(8192, [(768, 50257)])],
    "wav2vec2": [(8192, [(1024, 4096), (4096, 1024), (1024, 1024), (1024, 2048)])],
    "swin": [
        *((64 * side**2, [(c, 3 * c), (c, c), (c, 4 * c), (4 * c, c)]) for side, c in ((56, 128), (28, 256), (14, 512), (7, 1024))),
        *((64 * side**2, [(4 * c, 2 * c)]) for side, c in ((28, 128), (14, 256), (7, 512))),
    ],
}
#: GPT-2's other layers, whose weights are stored as (inputs, outputs).
LAYERS_IN_OUT = {"gpt2": [(8192, [(768, 2304), (768, 768), (768, 3072), (3072, 768)])]}


def is_large(m: int, n: int, k: int) -> bool:
    """Whether the goal of model products holds for this one."""
    return min(m, n) >= MIN_SIDE and k >= LEAST_K and 2 * m * n * k >= MIN_FLOPS


def model_products() -> list[tuple[str, int, int, int, str, bool]]:
    """(model, m, n, k, orders, with bias) of each layer's product, of its input's gradient and of its weight's gradient.

    ``orders`` has a letter for each operand: ``r``, rows are contiguous, or ``c``, columns are.
    """
    found = []
    for model, layers in (LAYERS | LAYERS_IN_OUT).items():
        for rows, sizes in layers:
            for i, o in sizes:
                if model in LAYERS_IN_OUT:
                    found += [(model, rows, o, i, "rr", True), (model, rows, i, o, "rc", False), (model, i, o, rows, "cr", False)]
                else:
                    found += [(model, rows, o, i, "rc", o < 50000), (model, rows, i, o, "rr", False), (model, o, i, rows, "cr", False)]
    return found


def cases() -> list[Case]:
    """Square products and ``model_products``. Goals are multiples of cuBLAS's time in fp32."""

    def case(m: int, n: int, k: int, goal: float | None, order: str = "rr", bias: bool = False, of: str = "", ways=()) -> Case:
        def matrix(rows: int, columns: int, order: str, device: torch.device) -> torch.Tensor:
            x = torch.randn(rows, columns, device=device) / k**0.5
            return x if order == "r" else x.mT.contiguous().mT

        def inputs(device: torch.device) -> tuple:
            if not asks_for_fp32():
                raise ValueError(f"fp32_precision is {torch.backends.cuda.matmul.fp32_precision!r}: cuBLAS would not compute in fp32")
            operands = matrix(m, k, order[0], device), matrix(k, n, order[1], device) * k**0.5
            return (*operands, torch.randn(n, device=device)) if bias else operands

        fn = (lambda a, b, d: torch.addmm(d, a, b)) if bias else torch.mm
        return Case(f"{of}{m}x{n}x{k} {order}", fn, inputs, fn, goal, flops=2 * m * n * k, ways=ways)

    if not torch.cuda.is_available():
        return []
    squares = [case(size, size, size, 0.5, order) for size in (4096, 8192) for order in ("rr", "rc", "cr", "cc")]
    squares += [case(2048, 2048, 2048, 0.71), case(1024, 1024, 1024, 1.0)]
    products = {
        (m, n, k, order): case(m, n, k, 0.63 if is_large(m, n, k) else None, order, bias, f"{model} ", ("eager", "fuse"))
        for model, m, n, k, order, bias in model_products()
    }
    return squares + list(products.values())


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        m, n, k = (size(draw, 16, 2**15) for _ in range(3))
        batch = draw.choice([0, 0, 0, size(draw, 2, 64)])
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
