"""The family ``sdpa``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.sdpa.match import Sdpa
from fusebackend.patterns.sdpa.ops import sdpa
from fusebackend.rewriting.family import Family

FAMILY = Family("sdpa", __name__, patterns=(Sdpa(),), operators=(sdpa,))
