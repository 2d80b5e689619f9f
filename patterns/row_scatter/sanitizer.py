"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.row_scatter.ops import DTYPES, reference, row_scatter
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Each way to load (along rows, across them, by elements) for each group (1, 4 or 8 rows that share an index); short and long bins."""

    def check(source: torch.Tensor, index: torch.Tensor, bins: int, self: torch.Tensor | None = None) -> None:
        exact = reference(source.cpu().double(), index.cpu(), bins, None if self is None else self.cpu().double())
        close(row_scatter(source, index, bins, self), exact, 4 * tolerance(source.dtype))

    for dtype in sorted(DTYPES, key=str):
        for copies in (1, 3, 9):
            even = torch.randint(0, 33, (1, 20, 136)).cuda()
            check(random((copies, 20, 136), dtype).cuda(), even, 33)
            check(random((copies, 20, 136), dtype).cuda(), even.int(), 34, random((copies, 20, 34), dtype).cuda())
            check(random((copies, 136, 24), dtype).cuda().mT, torch.randint(0, 3, (1, 24, 136)).cuda(), 200)
            check(random((copies, 20, 131), dtype).cuda(), even[..., :131], 64)
            check(random((copies, 131, 21), dtype).cuda().mT, torch.randint(0, 64, (1, 21, 131)).cuda(), 64)
        check(random((4, 600), dtype).cuda(), torch.randint(0, 700, (4, 600)).cuda(), 700)
