"""How much there is to read, to add and to write in a sum by index, whoever computes it."""

from __future__ import annotations

import dataclasses
import math

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.index_add.sites import Site
from fusebackend.rewriting import known_indices
from fusebackend.rewriting.workload import log2

_SECTOR = 32  # bytes that a GPU's memory moves at once


@dataclasses.dataclass(frozen=True)
class Amounts:
    """Of one sum, at the sizes that it was traced with.

    Attributes:
        rows, columns, entries: of what is added to, elements of a row, and rows that are added.
        source_rows: of the tensor that the rows are read from.
        itemsize: bytes of an element.
        index_bytes: of the index, the source's index and the weights.
        gathers: whether the rows are read by an index.
        is_constant: whether all elements that are added are one number.
        dynamic: whether a size is symbolic.
        suffix: of the kinds of work, for a CPU.
        known_share: the part of the entries that are added to the row that gets most; None where the index is not known.
    """

    rows: int
    columns: int
    entries: int
    source_rows: int
    itemsize: int
    index_bytes: float
    gathers: bool
    is_constant: bool
    dynamic: bool
    suffix: str
    known_share: float | None = None

    @classmethod
    def of(cls, site: Site) -> Amounts | None:
        """None where a size is known at run time only."""
        tensor, values = g.value(site.self), g.value(site.values)
        sizes, entries = g.hints(tensor.shape), g.hint(site.entries)
        source_rows = g.hint(values.shape[site.dim]) if site.index_dims == 1 else entries
        if sizes is None or entries is None or source_rows is None:
            return None
        vectors = [n for n in (site.index, site.source_index, site.weight) if n is not None]
        symbols = (*tensor.shape, *values.shape, site.entries)
        return cls(
            rows=sizes[site.dim],
            columns=math.prod(n for d, n in enumerate(sizes) if d != site.dim),
            entries=entries,
            source_rows=source_rows,
            itemsize=values.itemsize,
            index_bytes=float(entries * sum(g.value(n).itemsize for n in vectors)),
            gathers=site.source_index is not None,
            is_constant=site.values.target is torch.ops.aten.full.default,
            dynamic=any(isinstance(s, torch.SymInt) for s in symbols),
            suffix=" cpu" if tensor.device.type == "cpu" else "",
            known_share=known_indices.largest_share(site.index),
        )

    @property
    def largest_share(self) -> float:
        """The part of the entries that are added to the row that gets most. An index that is not known counts as even."""
        return self.known_share or 1 / max(self.rows, 1)

    @property
    def row_bytes(self) -> float:
        return float(self.columns * self.itemsize)

    @property
    def elements(self) -> float:
        return float(self.entries * self.columns)

    @property
    def entry_bytes(self) -> float:
        return self.elements * self.itemsize

    @property
    def out_bytes(self) -> float:
        return self.rows * self.row_bytes

    @property
    def contention(self) -> float:
        """Entries of a row, on average over the rows that have some."""
        return self.entries / max(_distinct(self.rows, self.entries), 1.0)

    @property
    def touched_bytes(self) -> float:
        """Of the rows that are added to, if the index is even."""
        return _distinct(self.rows, self.entries) * self.row_bytes

    @property
    def source_bytes(self) -> float:
        """Of the rows that are read, each counted once."""
        if self.is_constant:
            return 0.0
        return (_distinct(self.source_rows, self.entries) if self.gathers else self.entries) * self.row_bytes

    @property
    def gathered_bytes(self) -> float:
        return self.entry_bytes if self.gathers else 0.0

    @property
    def sectors(self) -> float:
        """Of memory, that additions to single elements go to, row by row."""
        return float(self.entries * math.ceil(self.row_bytes / _SECTOR))

    def shape(self) -> dict[str, float]:
        """What efficiency depends on in every kind of work."""
        return {
            "row": log2(self.row_bytes),
            "rows": log2(self.rows),
            "entries": log2(self.entries),
            "contention": log2(self.entries / max(self.rows, 1)),
            "source": log2(self.source_rows * self.row_bytes),
            "element": log2(self.itemsize),
            "gathers": float(self.gathers),
            "dynamic": float(self.dynamic),
        }


def _distinct(places: int, draws: int) -> float:
    """How many of so many places are hit by so many even draws, on average."""
    return -places * math.expm1(-draws / places) if places else 0.0
