"""The family ``foreach_cast``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.foreach_cast.match import ForeachCast
from fusebackend.patterns.foreach_cast.ops import foreach_cast
from fusebackend.rewriting.family import Family

FAMILY = Family("foreach_cast", __name__, patterns=(ForeachCast(),), operators=(foreach_cast,))
