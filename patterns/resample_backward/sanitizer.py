"""What compute-sanitizer watches of this family: every kernel, at small shapes."""

from __future__ import annotations

import itertools

import torch

from fusebackend.patterns.resample_backward.ops import HALVES, accumulator, reference, resample_backward
from fusebackend.tools.sanitizer import close, random, tolerance


def launch_every_kernel() -> None:
    """Vectors of 16 and 4 bytes and elements, along lanes and of planes; indices that go up, and others; rows that fill no block."""
    for before, after in [(torch.float64, torch.float64), *itertools.product((torch.float32, *sorted(HALVES, key=str)), repeat=2)]:
        for up in (True, False):
            for channels in (16, 6, 3):  # vectors of 16 and 4 bytes, and elements
                last = random((2, 10, 12, channels), before).movedim(-1, 1)
                _check(last, [0, 2, 3, 1], 2, [5, 7], [2, 2], after, up)
            _check(random((2, 3, 10, 64), before), [0, 1, 2, 3], 2, [5, 32], [2, 2], after, up)
            _check(random((2, 3, 10, 61), before), [0, 1, 2, 3], 2, [5, 32], [1, 4], after, up)
            _check(random((3, 5, 6, 7), before), [0, 1, 2, 3], 1, [3, 4, 2], [1, 2, 1], after, up)
            _check(random((2, 3, 9000), before), [0, 1, 2], 2, [4000], [2], after, up)


def _check(grad: torch.Tensor, order: list[int], dim: int, sizes: list[int], terms: list[int], after: torch.dtype, up: bool) -> None:
    indices = []
    for axis, (size, count) in enumerate(zip(sizes, terms)):
        length = grad.shape[dim + axis]
        indices += [torch.arange(length) * size // length if up else torch.randint(-size, size, (length,)) for _ in range(count)]
    weights = [random((len(index),), accumulator(grad.dtype)) for index in indices]
    exact = reference(grad.double(), dim, indices, [w.double() for w in weights], terms, sizes, order, torch.float64)
    on_gpu = [i.cuda() for i in indices], [w.cuda() for w in weights]
    close(resample_backward(grad.cuda(), dim, *on_gpu, terms, sizes, order, after), exact, 8 * tolerance(after))
