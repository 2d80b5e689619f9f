"""The family ``fp32_matmul``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.fp32_matmul.match import Fp32Matmul
from fusebackend.patterns.fp32_matmul.ops import matmul, matmul_planes
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "fp32_matmul",
    __name__,
    patterns=(Fp32Matmul(),),
    operators=(matmul, matmul_planes),
    samples=(
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "matmul",
        "nn.functional.linear",
        "addbmm",
        "mv",
        "einsum",
    ),
)
