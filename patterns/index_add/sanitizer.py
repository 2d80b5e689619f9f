"""What compute-sanitizer runs of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Every route of csrc/index_add/launch.h, with what it absorbs; in place, onto a copy, onto zeros, and by a sorted index."""
    from fusebackend.patterns.index_add import ops as family

    ops = torch.ops.fusebackend

    def check(
        shape, dim, n, dtype, *, precise=False, det=False, weighted=False, gathered=False, uneven=False, bounds=family.STRICT, scaled=True
    ):
        self, rows = random(shape, dtype), shape[dim]
        source_shape = [*shape[:dim], 40 if gathered else n, *shape[dim + 1 :]]
        source = random(source_shape, dtype)
        index = torch.randint(-rows if bounds == family.WRAP else 0, rows + (bounds == family.DROP), (n,))
        if uneven:
            index[: n // 2] = rows // 3
        weight = random((n,), dtype) if weighted else None
        source_index = torch.randint(0, 40, (n,)) if gathered else None
        alpha = 2.0 if scaled and dtype.is_floating_point and not weighted else 1.0
        cuda = [None if t is None else t.cuda() for t in (index, source, weight, source_index)]
        options = (dim, *cuda, alpha, None, bounds, precise, det)
        exact = family.reference(self, dim, index, source, weight, source_index, alpha, None, bounds)
        slack = 4 * tolerance(dtype)
        target = self.cuda()
        ops.index_add_(target, *options)
        close(target, exact, slack)
        close(ops.index_add(self.cuda(), *options), exact, slack)
        zeros = family.reference(torch.zeros_like(self), dim, index, source, weight, source_index, alpha, None, bounds)
        close(ops.index_add_zeros(rows, *options), zeros, slack)
        if n:  # the same by a sorted index
            plan = ops.index_plan(cuda[0], rows, None, bounds, cuda[3], 40 if gathered else 0)
            wanted = family.reference_plan(index, rows, None, bounds, source_index, 40 if gathered else 0)
            assert torch.equal(plan.cpu(), wanted)
            close(ops.index_add_zeros(rows, *options, plan), zeros, slack)

    half, single = torch.bfloat16, torch.float32
    for dtype in (single, torch.float64, torch.float16, half, torch.int64, torch.int32, torch.int16, torch.uint8):
        check((300, 64), 0, 200, dtype)  # kAtomicAdd
        check((300, 7), 0, 200, dtype)
        check((1000,), 0, 15, dtype)
        check((3, 50, 8), 1, 30, dtype, weighted=dtype.is_floating_point, gathered=True)
        check((200, 33), 0, 513, dtype, det=True)  # kSegmentedSum
        check((200, 64), 0, 900, dtype, det=True)
        check((20, 1024), 0, 15, dtype, scaled=False)  # kAtomicAdd of wide rows that are added as they are
        check((4, 256), 0, 2000, dtype, weighted=dtype.is_floating_point)  # kBlockTables
    for dtype in (single, half):
        check((300, 64), 0, 200, dtype, weighted=True, gathered=True)
        check((300, 64), 0, 200, dtype, bounds=family.WRAP)
        check((300, 64), 0, 200, dtype, bounds=family.DROP)
        check((5,), 0, 12000, dtype)  # kThreadTables
        check((7, 64), 0, 16000, dtype)
        check((7, 64), 0, 16000, dtype, det=True)
        check((20, 30, 33), 1, 700, dtype, det=True)
        check((4, 20000), 0, 20, dtype, det=True)  # kFewEntries
        check((300, 64), 0, 20, dtype, det=True)
    check((100, 64), 0, 2000, half)  # kAtomicAddFp32
    check((100, 33), 0, 500, half, precise=True)
    check((2, 600000), 0, 3, single)
    check((1000, 64), 0, 40000, single)
    check((300, 1024), 0, 16500, half, precise=True, gathered=True)  # kBucketSum
    for uneven in (False, True):
        check((3000, 1024), 0, 25000, single, gathered=True, uneven=uneven)
    check((50, 8), 0, 0, single)
