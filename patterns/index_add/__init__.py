"""The family ``index_add``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.index_add.match import IndexAdd
from fusebackend.patterns.index_add.ops import KERNELS
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "index_add",
    __name__,
    patterns=(IndexAdd(),),
    operators=KERNELS,
    samples=(
        "index_add",
        "index_put",
        "index_select",
        "scatter_add",
        "scatter_reduce",
        "gather",
        "take_along_dim",
        "nn.functional.embedding",
    ),
)
