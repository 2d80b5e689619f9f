"""How the kernels read what a program reads, by the hints of sizes: what they are compiled for, and what their time depends on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.computed_sums import ops
from fusebackend.patterns.computed_sums.expression import Expression, as_matrix, laid_out
from fusebackend.rewriting.device_facts import device_facts


@dataclasses.dataclass(frozen=True)
class Reading:
    """The inputs of a kernel.

    Attributes:
        dtypes, kinds: of each: a letter says how it lies (:func:`fusebackend.patterns.computed_sums.ops.kind`).
        batch, rows, columns: of what is computed; the rows of each image, where images are summed by themselves.
        misaligned: how many bytes behind an aligned address some rows begin.
        read, rest: bytes of what has a row for each row, and of the other inputs.
        device: where.
    """

    dtypes: tuple[torch.dtype, ...]
    kinds: str
    batch: int
    rows: int
    columns: int
    misaligned: int
    read: float
    rest: float
    device: torch.device

    @classmethod
    def of(
        cls, expression: Expression, order: Sequence[int], sizes: Sequence[int], begin: int, end: int, is_relaid: bool = False
    ) -> Reading:
        """Of the inputs of a program.

        Args:
            order, sizes: the dims of what is computed in the order of memory, and their sizes; those before ``begin`` are of the batch, and
                those from ``end`` on columns.
            is_relaid: as for :func:`laid_out`.
        """
        batch, rows, columns = (math.prod(part) for part in (sizes[:begin], sizes[begin:end], sizes[end:]))
        kinds, misaligned, read, rest = "", 0, 0.0, 0.0
        for leaf in expression.leaves:
            value = g.value(leaf.node)
            laid = laid_out(order, leaf, is_relaid) or ([], [])
            kinds += ops.kind(*as_matrix(*laid, end), [*sizes[:end], columns], begin) or "r"  # or copied, so that it is
            if kinds[-1] == "r":
                read += batch * rows * columns * value.itemsize
                misaligned |= (g.hint(value.storage_offset()) or 0) * value.itemsize % 16
            else:
                rest += math.prod(laid[0]) * value.itemsize
        values = [g.value(leaf.node) for leaf in expression.leaves]
        return cls(tuple(v.dtype for v in values), kinds, batch, rows, columns, misaligned, read, rest, values[0].device)

    def plan(self, outs: int, stored: Sequence[torch.dtype] = ()) -> Mapping[str, float]:
        """How the device computes it (:func:`fusebackend.patterns.computed_sums.ops.plan_facts`)."""
        multiprocessors = device_facts(self.device).multiprocessors
        return ops.plan_facts(self.dtypes, self.kinds, outs, self.rows, self.columns, multiprocessors, self.misaligned, stored, self.batch)

    def why_not_compiled(self, program: str, outs: int, stored: Sequence[torch.dtype] = ()) -> str | None:
        """Why there will be no kernel when the operator is called; None if it is compiled."""
        if self.device.type != "cuda" or not torch.cuda.is_available() or self.batch * self.rows * self.columns == 0:
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        vector = int(self.plan(outs, stored)["vector"])
        found = ops.compile_kernel(program, self.dtypes, self.kinds, outs, f"sm_{major}{minor}", vector, stored)
        return found if isinstance(found, str) else None
