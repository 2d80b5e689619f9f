"""The family ``resample_backward``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.resample_backward.match import ResampleBackward
from fusebackend.patterns.resample_backward.ops import resample_backward
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "resample_backward",
    __name__,
    patterns=(ResampleBackward(),),
    operators=(resample_backward,),
    samples=(
        "nn.functional.interpolate",
        "nn.functional.upsample_bilinear",
        "nn.functional.upsample_nearest",
        "index_put",
    ),
)
