"""Random products of 16-bit matrices, as attention has them, and as linear layers do.

By themselves, since beside the loops of attention little is seen of their time. Inductor compiles them, which calls a library, but pads
matrices that lie unaligned.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import size
from fusebackend.rewriting.library_product import called_product
from fusebackend.rewriting.pattern import Work

#: Elements of all three matrices together.
_MOST_ELEMENTS = 2**28


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """``torch.bmm``, or ``torch.mm``, of operands that lie by rows or by columns."""
    while True:
        dtype = draw.choice((torch.bfloat16, torch.float16))
        batch, (m, n, k) = _of_attention(draw) if draw.random() < 0.75 else _of_a_layer(draw)
        if (batch or 1) * (m * k + k * n + m * n) > scale * _MOST_ELEMENTS:
            continue
        by_columns = draw.random() < 0.4, draw.random() < 0.5
        made = functools.partial(_operands, batch, (m, n, k), by_columns, dtype)
        yield Case(f"{dtype} {batch}x{m}x{n}x{k} {by_columns}", torch.bmm if batch else torch.mm, made)


def work(case: Case, dynamic: bool, device: torch.device) -> Work:
    """What a case of ``random_cases`` makes a device do."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        left, right = case.inputs(device)
        found = called_product(left, right, dynamic)
    assert found is not None  # all sizes are numbers
    return found


def _of_attention(draw: random.Random) -> tuple[int, tuple[int, int, int]]:
    """(batch, sizes): of a product with the scores of a batch of heads, or of their gradients."""
    queries = draw.choice((49, 64, 144, 196, 197, 256, 512, 1024, size(draw, 8, 2048), size(draw, 8, 2048)))
    keys = queries if draw.random() < 0.8 else size(draw, 8, 2048)
    dim = draw.choice((16, 24, 32, 48, 64, 64, 80, 96, 128, size(draw, 8, 256)))
    heads = draw.choice((1, 2, 4, 6, 8, 12, 16)) * size(draw, 1, 2048)
    return heads, draw.choice(((queries, keys, dim), (queries, dim, keys), (keys, dim, queries)))


def _of_a_layer(draw: random.Random) -> tuple[int | None, tuple[int, int, int]]:
    """(batch or none, sizes)."""
    rows, columns, terms = size(draw, 8, 32768), size(draw, 8, 8192), size(draw, 8, 8192)
    if draw.random() < 0.6:
        return None, draw.choice(((rows, columns, terms), (columns, terms, rows)))
    return size(draw, 1, 64), (size(draw, 8, 4096), size(draw, 8, 1024), size(draw, 8, 1024))


def _operands(
    batch: int | None, sizes: tuple[int, int, int], by_columns: tuple[bool, bool], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = sizes
    outer = () if batch is None else (batch,)

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if not transposed:
            return torch.randn(*outer, rows, columns, device=device).to(dtype)
        return torch.randn(*outer, columns, rows, device=device).to(dtype).transpose(-1, -2)

    return matrix(m, k, by_columns[0]), matrix(k, n, by_columns[1])
