"""The family ``max_pool_backward``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.max_pool_backward.match import MaxPoolBackward
from fusebackend.patterns.max_pool_backward.ops import max_pool_backward
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "max_pool_backward",
    __name__,
    patterns=(MaxPoolBackward(),),
    operators=(max_pool_backward,),
    samples=(
        "nn.functional.max_pool1d",
        "nn.functional.max_pool2d",
        "nn.functional.max_pool3d",
        "nn.functional.adaptive_max_pool1d",
        "nn.functional.adaptive_max_pool2d",
        "nn.functional.adaptive_max_pool3d",
    ),
)
