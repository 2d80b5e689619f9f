"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.permute.ops import permute_copy
from fusebackend.tools.sanitizer import random


def launch_every_kernel() -> None:
    """Rows, tiles and boxes (csrc/common/tile/route.h), of every element size, aligned and not."""
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128):
        for shape, permutation in [
            ((130, 200), (1, 0)),
            ((3, 128, 256), (0, 2, 1)),
            ((5, 33, 65), (2, 1, 0)),
            ((40, 3, 128), (0, 2, 1)),
            ((20, 30, 33), (1, 0, 2)),
            ((6, 10, 512), (1, 0, 2)),
            ((64, 64, 4), (1, 0, 2)),
            ((5, 7, 9, 11), (3, 1, 2, 0)),
        ]:
            x = torch.randn(shape, dtype=dtype) if dtype.is_complex else random(shape, dtype)
            for start in (0, 1):
                moved = x.cuda()[..., start:].permute(permutation)
                out = permute_copy(moved, list(range(len(shape))))
                assert torch.equal(out.cpu(), x[..., start:].permute(permutation))
