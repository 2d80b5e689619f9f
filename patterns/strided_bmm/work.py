"""The work of the kernels, from how they compute a product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusebackend.patterns.strided_bmm.layout import Layout
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2, log2_run


def strided_product(layout: Layout, device: torch.device, computed: Sequence[int] = ()) -> Work:
    """That of one product.

    An operand is read once for each tile along the other's rows: from memory first, from caches then. A tile at an edge is computed whole.

    Args:
        computed: the elements of operands that are copied, or that Inductor would compute in a loop over the products: here each is a
            kernel of its own.
    """
    outer, batch, m, n, k = layout.sizes
    tile, itemsize, multiprocessors = layout.plan, layout.dtype.itemsize, device_facts(device).multiprocessors
    rows, columns, entries = (int(tile[name]) for name in ("rows", "columns", "entries"))
    along_rows, along_columns = -(-m // rows), -(-n // columns)
    blocks = outer * -(-batch // entries) * along_rows * along_columns
    waves = -(-blocks // multiprocessors)
    read, result = outer * batch * (m + n) * k, outer * batch * m * n
    staged = blocks * entries * (rows + columns) * k
    computed_elements = blocks * entries * rows * columns
    quantities = {
        f"flops in {8 * itemsize} bits": 2.0 * computed_elements * k,
        "bytes": float(itemsize * (read + result)),
        "staged bytes": float(itemsize * staged),
        "depth in waves": float(waves * entries * k),
        "computed bytes": 2.0 * itemsize * sum(computed),
        "launches": float(1 + len(computed)),
    }
    shape = {
        **{f"log2 {name}": log2(count) for name, count in zip(("batch", "m", "n", "k"), (outer * batch, m, n, k))},
        "log2 entries": log2(entries),
        "log2 padded": log2(computed_elements / result),
        "log2 waves": log2(blocks / multiprocessors),
        "log2 row of the result": log2_run(itemsize * (batch if layout.is_batch_innermost else n)),
        "the batch is innermost in x": float(layout.x_strides[1] == 1),
        "the batch is innermost in the result": float(layout.is_batch_innermost),
        "x by rows": float(layout.x_strides[2] == 1),
        "y by rows": float(layout.y_strides[2] == 1),
        "log2 itemsize": log2(itemsize),
    }
    return Work("strided_bmm", quantities, shape)
