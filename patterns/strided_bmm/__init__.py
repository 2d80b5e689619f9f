"""The family ``strided_bmm``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.strided_bmm.match import StridedBmm
from fusebackend.patterns.strided_bmm.ops import strided_bmm
from fusebackend.rewriting.family import Family

FAMILY = Family("strided_bmm", __name__, patterns=(StridedBmm(),), operators=(strided_bmm,), samples=())
