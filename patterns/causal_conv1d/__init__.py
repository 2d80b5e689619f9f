"""The family ``causal_conv1d``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.causal_conv1d.match import CausalConv1d, CausalConv1dBackward
from fusebackend.patterns.causal_conv1d.match_fft import FftConvolution, FftConvolutionBackward
from fusebackend.patterns.causal_conv1d.ops import causal_conv1d, causal_conv1d_backward
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "causal_conv1d",
    __name__,
    patterns=(CausalConv1d(), CausalConv1dBackward(), FftConvolution(), FftConvolutionBackward()),
    operators=(causal_conv1d, causal_conv1d_backward),
    samples=(
        "nn.functional.conv1d",
        "nn.functional.pad",
        "constant_pad_nd",
    ),
)
