"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.small_bmm.ops import DTYPES, small_bmm
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Vectors of four and single elements, two and four rows a thread, each order of both operands, a last block that is not full."""
    for dtype in sorted(DTYPES, key=str):
        for batch, m, n, k in ((70, 16, 16, 16), (9, 32, 32, 32), (150, 4, 8, 12), (41, 3, 5, 7), (3, 31, 31, 31), (5, 20, 4, 8)):
            for a_transposed in (False, True):
                for b_transposed in (False, True):
                    a = random((batch, k, m) if a_transposed else (batch, m, k), dtype).cuda()
                    b = random((batch, n, k) if b_transposed else (batch, k, n), dtype).cuda()
                    x, y = a.mT if a_transposed else a, b.mT if b_transposed else b
                    close(small_bmm(x, y), torch.bmm(x.cpu().double(), y.cpu().double()), 4 * tolerance(dtype))
        a = random((71, 4, 4), dtype).cuda().flatten()[1 : 1 + 70 * 16].view(70, 4, 4)  # misaligned
        close(small_bmm(a, a), torch.bmm(a.cpu().double(), a.cpu().double()), 4 * tolerance(dtype))
