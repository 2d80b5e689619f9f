"""The family ``contraction``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.contraction.match import Contraction
from fusebackend.rewriting.family import Family

FAMILY = Family("contraction", __name__, patterns=(Contraction(),), operators=(), samples=())
