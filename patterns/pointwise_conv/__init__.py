"""The family ``pointwise_conv``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.pointwise_conv.match import PointwiseConvBackward
from fusebackend.rewriting.family import Family

FAMILY = Family("pointwise_conv", __name__, patterns=(PointwiseConvBackward(),), operators=())
