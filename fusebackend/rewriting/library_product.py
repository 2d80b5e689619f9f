"""The work of a library's matrix product: of one that a graph has, and of one that would be put there, with the copies that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusebackend import fx_utils as g
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import alignment, library_tiles, log2


def library_product(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    copied: Sequence[int] = (),
    computed: Sequence[int] = (),
    reordered: int = 0,
    by_columns: tuple[bool, bool] = (False, False),
    dynamic: float = 0.0,
) -> Work:
    """The product itself, and a kernel for each operand that is copied or computed first, and for a result in another order.

    Args:
        sizes: batch, rows, columns and terms.
        dtype: of the elements.
        copied, computed: the elements of operands that are copied, and of those that Inductor would compute in a loop over the products.
        reordered: the elements of a result that is copied into another order.
        by_columns: whether each operand lies transposed, or its copy does.
        dynamic: 1 where sizes are symbolic.
    """
    batch, m, n, k = sizes
    size = dtype.itemsize
    quantities = {
        f"flops in {8 * size} bits": 2.0 * batch * m * n * k,
        "bytes": float(size * batch * (m * k + n * k + m * n)),
        "copied bytes": 2.0 * size * sum(copied),
        "computed bytes": 2.0 * size * sum(computed),
        "reordered bytes": 2.0 * size * reordered,
        "launches": float(1 + len(copied) + len(computed) + bool(reordered)),
    }
    shape = {
        **{f"log2 {name}": log2(count) for name, count in zip(("batch", "m", "n", "k"), sizes)},
        **{f"{name} alignment": alignment(size * count) for name, count in zip("mnk", (m, n, k))},
        "log2 shorter": log2(min(m, n)),
        "log2 flops per byte": log2(m * n * k / (m * k + k * n + m * n)),
        "x by columns": float(by_columns[0]),
        "y by columns": float(by_columns[1]),
        "copies": float(len(copied)),
        "log2 itemsize": log2(size),
        "dynamic": dynamic,
    }
    if device.type == "cuda":
        multiprocessors = device_facts(device).multiprocessors
        for tile, tiles, waves in library_tiles(batch, m, n, multiprocessors):
            quantities[f"depth in waves of {tile}"] = float(waves * k)
            shape[f"log2 waves of {tile}"] = log2(tiles / multiprocessors)
            shape[f"log2 padded to {tile}"] = log2(tiles * tile * tile / (batch * m * n))
    return Work(f"contraction{' cpu' if device.type == 'cpu' else ''}", quantities, shape)


def called_product(left: torch.Tensor, right: torch.Tensor, dynamic: bool) -> Work | None:
    """The product of two matrices of 16 bits, or of batches of them, as Inductor calls the library on a GPU.

    Args:
        dynamic: whether sizes are symbolic.

    Returns:
        None if a size depends on data.
    """
    a, b = g.hints(left.shape), g.hints(right.shape)
    a_strides, b_strides = g.hints(left.stride()), g.hints(right.stride())
    if a is None or b is None or a_strides is None or b_strides is None:
        return None
    (m, k), n = a[-2:], b[-1]
    batch = a[0] if len(a) == 3 else 1
    itemsize = left.itemsize
    quantities = {
        "flops": 2.0 * batch * m * n * k,
        "bytes": float(itemsize * batch * (m * k + k * n + m * n)),
    }
    shape = {
        "log2 m": log2(m),
        "log2 n": log2(n),
        "log2 k": log2(k),
        "log2 batch": log2(batch),
        "m alignment": alignment(itemsize * m),
        "n alignment": alignment(itemsize * n),
        "k alignment": alignment(itemsize * k),
        "a by columns": float(a_strides[-2] == 1 and a_strides[-1] != 1),
        "b by columns": float(b_strides[-2] == 1 and b_strides[-1] != 1),
        "batched": float(len(a) == 3),
        "dynamic": float(dynamic),
    }
    multiprocessors = device_facts(left.device).multiprocessors
    for tile, tiles, waves in library_tiles(batch, m, n, multiprocessors):
        quantities[f"depth in waves of {tile}"] = float(waves * k)
        shape[f"log2 waves of {tile}"] = log2(tiles / multiprocessors)
        shape[f"log2 padded to {tile}"] = log2(tiles * tile * tile / max(batch * m * n, 1))
    return Work(f"cublas {8 * itemsize} bits", quantities, shape)
