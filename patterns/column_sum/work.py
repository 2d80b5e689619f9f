"""The work of the kernels, and of Inductor's sums, from sizes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.column_sum.ops import plan_facts, wide_dtype
from fusebackend.patterns.column_sum.sites import Site
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2, log2_run


@dataclasses.dataclass(frozen=True)
class Pass:
    """One call of the kernels.

    Attributes:
        sizes, strides: of what is read, in memory order.
        begin, end: the dims that are summed.
        dtype, results: of what is read, and of each result.
        device: where.
        is_dynamic: whether sizes are symbolic.
        misaligned: how many bytes behind an aligned address it begins.
        y_strides, plain, products: as for :func:`plan_facts`.
    """

    sizes: Sequence[int]
    strides: Sequence[int]
    begin: int
    end: int
    dtype: torch.dtype
    results: tuple[torch.dtype, ...]
    device: torch.device
    is_dynamic: bool
    misaligned: int = 0
    y_strides: Sequence[int] | None = None
    plain: bool = True
    products: bool = False

    @classmethod
    def over(cls, sums: Sequence[Site], x: torch.Tensor, y: torch.Tensor | None = None, plain: bool = True, products: bool = False) -> Pass:
        """That of sums over the same dims of ``x``, and of products with ``y``. All sizes have hints."""
        order = sums[0].order

        def strides(t: torch.Tensor) -> list[int]:
            return g.hints([t.stride(d) for d in order]) or []

        offset = g.hint(x.storage_offset()) or 0  # type: ignore[arg-type]
        return cls(
            g.hints([x.shape[d] for d in order]) or [],
            strides(x),
            sums[0].begin,
            sums[0].end,
            x.dtype,
            tuple(g.value(s.node).dtype for s in sums),
            x.device,
            is_dynamic(x),
            offset * x.itemsize % 16,
            None if y is None else strides(y),
            plain,
            products,
        )

    @property
    def kept(self) -> list[int]:
        """The sizes of a result."""
        return [*self.sizes[: self.begin], *self.sizes[self.end :]]

    def work(self) -> Work:
        shape = shape_of(self.sizes, self.begin, self.end, self.dtype, self.is_dynamic)
        elements = float(math.prod(self.sizes)) * (1 if self.y_strides is None else 2)
        written = float(math.prod(self.kept)) * sum(t.itemsize for t in self.results)
        quantities = {"written": written, "read": elements * self.dtype.itemsize}
        if self.device.type == "cpu":
            return Work("column_sum cpu", {**quantities, "elements": elements}, {**shape, "threads": log2(torch.get_num_threads())})
        facts = plan_facts(
            self.sizes,
            self.strides,
            self.begin,
            self.end,
            self.dtype,
            self.results[0],
            device_facts(self.device).multiprocessors,
            self.misaligned,
            y_strides=self.y_strides,
            plain=self.plain,
            products=self.products,
        )
        sums = facts["partials"] * wide_dtype(self.dtype, self.results[0]).itemsize
        planned, laid_out = planned_work(facts, quantities["read"], 2 * sums)
        return Work("column_sum", quantities | planned, shape | laid_out)


def planned_work(facts: Mapping[str, float], read: float, partial: float) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities and the shape of the work that a plan (:func:`plan_facts`) makes of rows.

    Args:
        read: bytes of the rows.
        partial: bytes that the first kernel leaves for the second, written and read.
    """
    quantities = {
        "partial": partial,
        "blocks": facts["blocks"],
        "loads": read / facts["vector_bytes"],
        "launches": 1.0 + (partial > 0),
    }
    names = ("vector_bytes", "width", "lanes", "threads", "splits", "blocks")
    return quantities, {name.replace("_", " "): log2(facts[name]) for name in names}


def contiguous(sizes: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides, step = [0] * len(sizes), 1
    for d in reversed(range(len(sizes))):
        strides[d] = step
        step *= max(sizes[d], 1)
    return strides


def sum_over_rows(batch: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device, is_dynamic: bool) -> Work:
    """What Inductor makes of the sum over the rows of ``batch`` contiguous matrices, which are in memory."""
    read, written = (float(batch * n * columns * dtype.itemsize) for n in (rows, 1))
    if device.type == "cpu":
        return Work("stream cpu", {"bytes": read + written}, {"log2 itemsize": log2(dtype.itemsize)})
    shape = shape_of([batch, rows, columns], 1, 2, dtype, is_dynamic) | {"nodes": 0.0, "gathers": 0.0}
    quantities = {"written": written, "read": read, "gathered": 0.0, "computed": 0.0, "launches": 1.0}
    return Work("inductor column sum", quantities, shape)


def is_dynamic(value: torch.Tensor) -> bool:
    return not all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def shape_of(sizes: Sequence[int], begin: int, end: int, dtype: torch.dtype, is_dynamic: bool) -> dict[str, float]:
    """The shape of a sum that all descriptions share.

    Args:
        sizes: in memory order.
        begin, end: the dims that are summed.
    """
    batch, rows, columns = (float(math.prod(sizes[a:b])) for a, b in ((0, begin), (begin, end), (end, len(sizes))))
    return {
        "rows": log2(rows),
        "columns": log2(columns),
        "batch": log2(batch),
        "log2 itemsize": log2(dtype.itemsize),
        "row": log2_run(columns * dtype.itemsize),
        "dynamic": float(is_dynamic),
    }
