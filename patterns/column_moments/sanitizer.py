"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.column_moments.ops import column_moments, reference
from fusebackend.patterns.column_sum.ops import DTYPES
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Loads of each length, folded rows with a tail, rows with gaps, blocks side by side, batches; with one kernel and with two."""

    def check(x: torch.Tensor, begin: int, end: int, correction: float = 0.0, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or x.dtype
        exact = reference(x.cpu().double(), begin, end, correction, 1e-5, torch.float64)
        for found, wanted in zip(column_moments(x, begin, end, correction, 1e-5, dtype), exact):
            close(found, wanted, 4 * tolerance(dtype))

    for dtype in sorted(DTYPES, key=str):
        x = (random((700, 67), dtype) + 1).cuda()
        check(x, 0, 1)
        check(x[:, :64], 0, 1, 1.0)
        check(x[:, :64].contiguous(), 0, 1)
        check(x[:, 1:65], 0, 1)
        check(x.flatten()[1 : 1 + 8 * 500].view(500, 8), 0, 1)
        check(x.flatten()[2 : 2 + 8 * 500].view(500, 8), 0, 1)
        check(x, 0, 1, dtype=torch.float64)
        check((random((40, 3, 24), dtype) + 1).cuda(), 1, 2)
        check((random((30, 2100), dtype) + 1).cuda(), 0, 1)
        check((random((5, 200, 16), dtype) + 1).cuda(), 1, 2)
