"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.max_pool_backward.ops import max_pool_backward, reference
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Of each dtype vectors and elements, along lanes and rows; windows that are compiled in, and others; ends of rows."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for channels in (16, 3):
            _check(random((2, 5, 6, channels), dtype).movedim(-1, 1), [0, 2, 3, 1], [10, 11], [3, 3], [2, 2], [1, 1])
        for kernel, stride, padding in ((2, 2, 0), (3, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)):
            for size in (16, 13):
                windows = (size + 2 * padding - kernel) // stride + 1
                _check(random((2, 3, windows), dtype), [0, 1, 2], [size], [kernel], [stride], [padding])
        _check(random((2, 3, 4, 3, 2), dtype), [0, 1, 2, 3, 4], [8, 6, 5], [2, 2, 2], [2, 2, 2], [0, 0, 0])
        _check(random((2, 4, 3, 8), dtype), [0, 1, 3, 2], [8, 6], [2, 2], [2, 2], [0, 0], [2, 1])


def _check(
    grad: torch.Tensor,
    order: list[int],
    sizes: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int] | None = None,
) -> None:
    elements = int(torch.tensor(kernel).prod())
    offsets = torch.empty_like(grad, dtype=torch.int8).copy_(torch.randint(-1, elements + 1, grad.shape))
    windows = sizes, kernel, stride, padding, dilation or [1] * len(kernel), order
    exact = reference(grad.double(), offsets, *windows)
    close(max_pool_backward(grad.cuda(), offsets.cuda(), *windows), exact, 8 * tolerance(grad.dtype))
