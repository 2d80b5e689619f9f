"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.column_sum.ops import DTYPES, column_sum, reference
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Loads of each length, folded rows with a tail, rows with gaps, blocks side by side, batches; with one kernel and with two."""

    def check(x: torch.Tensor, begin: int, end: int, mean: bool = False, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or x.dtype
        exact = reference(x.cpu().double(), begin, end, mean, torch.float64)
        close(column_sum(x, begin, end, mean, dtype), exact, 4 * tolerance(dtype))

    for dtype in sorted(DTYPES, key=str):
        x = random((700, 67), dtype).cuda()
        check(x, 0, 1)
        check(x[:, :64], 0, 1, True)
        check(x[:, :64].contiguous(), 0, 1)
        check(x[:, 1:65], 0, 1)
        check(x.flatten()[1 : 1 + 8 * 500].view(500, 8), 0, 1)
        check(x.flatten()[2 : 2 + 8 * 500].view(500, 8), 0, 1)
        check(x, 0, 1, dtype=torch.float64)
        check(random((40, 3, 24), dtype).cuda(), 1, 2)
        check(random((30, 2100), dtype).cuda(), 0, 1)
        check(random((5, 200, 16), dtype).cuda(), 1, 2, True)
