"""The family ``column_sum``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.column_sum.match import ColumnSum
from fusebackend.patterns.column_sum.ops import column_sum, column_sums
from fusebackend.rewriting.family import Family

FAMILY = Family("column_sum", __name__, patterns=(ColumnSum(),), operators=(column_sum, column_sums), samples=("sum", "mean"))
