"""The family ``column_moments``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.column_moments.match import ColumnMoments
from fusebackend.patterns.column_moments.ops import column_moments
from fusebackend.rewriting.family import Family

FAMILY = Family("column_moments", __name__, patterns=(ColumnMoments(),), operators=(column_moments,), samples=("var", "std"))
