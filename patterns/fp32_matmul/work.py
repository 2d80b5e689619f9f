"""What the kernels make a GPU do for a product: asks C++ (csrc/fp32_matmul/work.h), where there is no GPU as well."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from fusebackend.native import ops

_facts = ops.define_facts("fp32_matmul_work(int[] sizes, int[] a, int[] b, int[] device) -> str")


def kernel_work(sizes: Sequence[int], a: Sequence[int], b: Sequence[int], device: Sequence[int]) -> Mapping[str, float]:
    """The facts that csrc/fp32_matmul/work.h names; none for an empty product.

    Args:
        sizes: m, n, k and batch.
        a, b: of each operand, the strides of its rows, columns and batch in elements, and its offset from an aligned address in bytes.
        device: compute capability, major and minor, number of multiprocessors, and whether there is the kernel ``wgmma``.
    """
    return _known_work(tuple(sizes), tuple(a), tuple(b), tuple(device))


@functools.lru_cache(maxsize=4096)
def _known_work(*of: tuple[int, ...]) -> Mapping[str, float]:
    """The facts, asked once: a model's layers are alike."""
    return _facts(*map(list, of))
