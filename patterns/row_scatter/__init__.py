"""The family ``row_scatter``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.row_scatter.match import RowScatter
from fusebackend.patterns.row_scatter.ops import row_scatter
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "row_scatter",
    __name__,
    patterns=(RowScatter(),),
    operators=(row_scatter,),
    samples=(
        "gather",
        "scatter_add",
        "scatter_reduce",
        "take_along_dim",
    ),
)
