"""The family ``computed_sums``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.computed_sums.match import ComputedRows, ComputedSums
from fusebackend.patterns.computed_sums.ops import computed_rows, computed_sums
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "computed_sums",
    __name__,
    patterns=(ComputedSums(), ComputedRows()),
    operators=(computed_sums, computed_rows),
    samples=("native_batch_norm_backward",),
)
