"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.tools.sanitizer import random


def launch_every_kernel() -> None:
    """Rows, tiles and boxes; every element size; slices."""
    ops = torch.ops.fusebackend

    def copy(shape, permutation, dtype, start=0):
        x = random(shape, dtype)
        moved = x.cuda()[..., start:].permute(permutation)
        out = ops.permute_copy(moved, list(range(len(shape))))
        assert torch.equal(out.cpu(), x[..., start:].permute(permutation))

    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128):
        random_ = torch.complex128 if dtype == torch.complex128 else dtype
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
            if random_.is_complex:
                x = torch.complex(torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64))
                assert torch.equal(ops.permute_copy(x.cuda().permute(permutation), list(range(len(shape)))).cpu(), x.permute(permutation))
            else:
                copy(shape, permutation, dtype)
                copy(shape, permutation, dtype, start=1)
