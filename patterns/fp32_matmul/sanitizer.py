"""The calls that compute-sanitizer watches: every kernel of the family, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.fp32_matmul.match import unavailable
from fusebackend.tools.sanitizer import close


def launch_every_kernel() -> None:
    """Whole tiles, tiles split in parts and in shares, every memory order, batches, an added matrix, planes of the caller."""
    if torch.cuda.get_device_capability() != (9, 0) or unavailable(torch.device("cuda", 0)):
        return
    ops = torch.ops.fusebackend

    def operand(shape, order):
        *batch, rows, columns = shape
        if order == "rows":
            return torch.randn(*batch, rows, columns).cuda()
        if order == "columns":
            return torch.randn(*batch, columns, rows).cuda().mT
        return torch.randn(*batch, rows + 1, columns + 3).cuda()[..., 1:, 3:]

    def check(m, n, k, orders=("rows", "rows"), batch=(), d=None, alpha=1.0, beta=0.0):
        a, b = operand((*batch, m, k), orders[0]), operand((*batch, k, n), orders[1])
        exact = alpha * (a.cpu().double() @ b.cpu().double()) + (0 if d is None else beta * d.double())
        added = None if d is None else d.cuda()
        close(ops.matmul(a, b, added, alpha, beta), exact, 1e-6)
        for kernel in ("mma", "ffma"):
            close(ops.matmul(a, b, added, alpha, beta, None, -1, None, -1, kernel), exact, 1e-6)
        a_planes, b_planes = ops.matmul_planes(a, -1), ops.matmul_planes(b, -2)
        close(ops.matmul(a, b, added, alpha, beta, a_planes, -1, b_planes, -2), exact, 1e-6)

    for orders in (("rows", "rows"), ("columns", "rows"), ("rows", "columns"), ("slice", "columns")):
        check(129, 257, 96, orders)
    check(3, 5, 7)
    check(128, 256, 32)
    check(127, 255, 1234)
    check(384, 512, 700, d=torch.randn(512), alpha=1.5, beta=0.5)
    check(100, 90, 130, batch=(3,), d=torch.randn(3, 100, 90), beta=1.0)
    check(2304, 2304, 64)  # more tiles than multiprocessors
    check(64, 64, 0)
