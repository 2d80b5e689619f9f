"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.column_sum.ops import DTYPES, PRODUCT_DTYPES, column_sum, column_sums, reference, sums_reference
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Loads of each length, folded rows with a tail, rows with gaps, blocks side by side, batches; one kernel and two; products."""

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

    def check_products(x: torch.Tensor, y: torch.Tensor | None, begin: int, end: int) -> None:
        for dtype in (None, x.dtype):
            rounded, f32 = x.dtype.itemsize == 2, torch.float32
            plain, on_cpu = None if dtype is None else f32, [None if t is None else t.cpu() for t in (x, y)]
            exact = sums_reference(*on_cpu, begin, end, plain, True, f32, False, rounded)
            for found, wanted in zip(column_sums(x, y, begin, end, dtype, True, x.dtype, False, rounded), exact):
                close(found, wanted, 4 * tolerance(x.dtype))

    for dtype in sorted(PRODUCT_DTYPES, key=str):
        x, z = (random((700, 67), dtype).cuda() for _ in range(2))
        for a, b in ((x, z), (x, None)):
            check_products(a, b, 0, 1)
            check_products(a[:, :64], None if b is None else b[:, 1:65], 0, 1)
            check_products(a[:, 2:66], None if b is None else b[:, :64], 0, 1)
            check_products(a[:, :64].contiguous(), None if b is None else b[:, :64].contiguous(), 0, 1)
        x, z = (random((5, 200, 16), dtype).cuda() for _ in range(2))
        check_products(x, z, 1, 2)
        check_products(x, None, 1, 2)
