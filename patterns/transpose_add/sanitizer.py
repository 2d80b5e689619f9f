"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.transpose_add.ops import transpose_add
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Rows, tiles and boxes (csrc/common/tile/route.h), with one or both operands transposed; broadcast and misaligned ones."""

    def add(x, y, alpha, order):
        out = transpose_add(x, y, alpha, int(alpha), order)
        close(out, x.cpu().double() + alpha * y.cpu().double(), tolerance(x.dtype))

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x, y = random((200, 130), dtype).cuda(), random((130, 200), dtype).cuda()
        add(x.t(), y, 1.0, [0, 1])
        add(y, x.t(), 2.0, [0, 1])
        add(x.t(), random((200, 130), dtype).cuda().t(), 1.0, [0, 1])
        add(x[1:, 3:].t(), random((127, 199), dtype).cuda(), 0.5, [0, 1])
        add(random((100, 3), dtype).cuda().t(), random((3, 100), dtype).cuda(), 1.0, [0, 1])
        add(random((4, 64, 96), dtype).cuda().transpose(1, 2), random((96, 64), dtype).cuda(), 1.0, [0, 1, 2])
        add(x.t(), random((1, 200), dtype).cuda().expand(130, 200), 1.0, [0, 1])
