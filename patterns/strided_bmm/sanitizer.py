"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.strided_bmm.ops import DTYPES, strided_bmm
from fusebackend.tools.sanitizer import close, random, tolerance

#: Where the rows, the terms or the batch are innermost: the dims from the outermost to the innermost in memory.
_TERMS, _ROWS, _BATCH = (0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 3, 1)


def launch_every_kernel() -> None:
    """Each dim innermost in each tensor, tails of rows, columns and terms, several tiles a block, all and some batch entries a tile."""
    for dtype in sorted(DTYPES, key=str):
        for batch, m, n, k in ((24, 37, 72, 40), (48, 33, 40, 80), (8, 5, 8, 8)):
            for y_order in (_TERMS, _ROWS):
                for x_order in (_TERMS, _ROWS):
                    for order in ((0, 2, 3, 1), (0, 1, 2, 3)):
                        _multiply(dtype, (2, batch, m, n, k), x_order, y_order, order)
            for x_order in (_BATCH, (0, 3, 2, 1)):  # beside columns that are innermost
                _multiply(dtype, (2, batch, m, n, k), x_order, _ROWS, (0, 2, 1, 3))


def _multiply(
    dtype: torch.dtype, sizes: tuple[int, ...], x_order: tuple[int, ...], y_order: tuple[int, ...], order: tuple[int, ...]
) -> None:
    outer, batch, m, n, k = sizes
    x, y = (random((outer, batch, rows, k), dtype) for rows in (m, n))
    exact = x.double() @ y.double().mT
    close(strided_bmm(_in_order(x.cuda(), x_order), _in_order(y.cuda(), y_order), list(order)), exact, 4 * tolerance(dtype))


def _in_order(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same, with rows of whole vectors: the innermost dim in memory has a gap behind it."""
    sizes = [x.shape[d] for d in order]
    holder = x.new_zeros((*sizes[:-1], -(-sizes[-1] // 8) * 8))[..., : sizes[-1]]
    holder.copy_(x.permute(order))
    return holder.permute([order.index(d) for d in range(4)])
