"""The family ``attention``: see README.md."""

from __future__ import annotations

from fusebackend.patterns.attention.match import Attention
from fusebackend.patterns.attention.memory_efficient import MemoryEfficientAttention
from fusebackend.patterns.attention.ops import attention, attention_backward
from fusebackend.rewriting.family import Family

FAMILY = Family(
    "attention",
    __name__,
    patterns=(Attention(), MemoryEfficientAttention()),
    operators=(attention, attention_backward),
    samples=("nn.functional.scaled_dot_product_attention", "softmax"),
)
