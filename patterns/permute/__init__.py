"""The family ``permute``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.permute.match import Permute
from fusebackend.patterns.permute.ops import permute_copy
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "permute",
    __name__,
    patterns=(Permute(),),
    operators=(permute_copy,),
    samples=(
        "contiguous",
        "clone",
        "reshape",
        "flatten",
        "permute",
        "transpose",
        "t",
        "movedim",
        "expand",
        "T",
        "mT",
    ),
)
