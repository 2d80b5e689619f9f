"""What the kernels make a GPU do for a product: asks C++ (csrc/fp32_matmul/work.h), where there is no GPU as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.utils._python_dispatch import _disable_current_modes

from fusebackend.native import ops

_QUERY = "fp32_matmul_work(int[] sizes, int[] a, int[] b, int[] device) -> str"


def kernel_work(sizes: Sequence[int], a: Sequence[int], b: Sequence[int], device: Sequence[int]) -> Mapping[str, float]:
    """The facts that csrc/fp32_matmul/work.h names; none for an empty product.

    Args:
        sizes: m, n, k and batch.
        a, b: of each operand, the strides of its rows, columns and batch in elements, and its offset from an aligned address in bytes.
        device: compute capability, major and minor, number of multiprocessors, and whether there is the kernel ``wgmma``.
    """
    return {name: float(number) for name, number in (fact.split("=") for fact in _ask(sizes, a, b, device).split())}


def _ask(sizes, a, b, device) -> str:
    with _disable_current_modes():
        return _work(list(sizes), list(a), list(b), list(device))


_work = ops.define(_QUERY, fake=_ask)
