"""The family ``transpose_add``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.transpose_add.match import TransposeAdd
from fusebackend.patterns.transpose_add.ops import transpose_add
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "transpose_add",
    __name__,
    patterns=(TransposeAdd(),),
    operators=(transpose_add,),
    samples=(
        "add",
        "sub",
        "rsub",
    ),
)
