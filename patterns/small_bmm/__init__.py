"""The family ``small_bmm``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.small_bmm.match import SmallBmm
from fusebackend.patterns.small_bmm.ops import small_bmm
from fusebackend.rewriting.family import Family

FAMILY = Family("small_bmm", __name__, patterns=(SmallBmm(),), operators=(small_bmm,), samples=("bmm",))
