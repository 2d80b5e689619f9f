"""The family ``depthwise_conv``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.depthwise_conv.match import DepthwiseConv, DepthwiseConvBackward
from fusebackend.patterns.depthwise_conv.ops import depthwise_conv, depthwise_conv_backward
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "depthwise_conv",
    __name__,
    patterns=(DepthwiseConv(), DepthwiseConvBackward()),
    operators=(depthwise_conv, depthwise_conv_backward),
    samples=("nn.functional.conv1d", "nn.functional.conv2d"),
)
