"""For describing the work of a site (:class:`fusebackend.rewriting.pattern.Work`)."""

from __future__ import annotations

import math

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Work

_LINE = 128  # bytes of a cache line
_LONGEST_RUN = 8192  # bytes; longer runs are alike


def log2(x: float) -> float:
    """log2, of at least 2**-20."""
    return math.log2(max(x, 2.0**-20))


def alignment(byte_counts: int) -> float:
    """log2 of the largest power of two up to 128 that divides it."""
    return math.log2(math.gcd(byte_counts, _LINE))


def log2_run(byte_count: float) -> float:
    """log2 of the bytes that lie one behind the other; those of long runs are alike."""
    return log2(min(byte_count, _LONGEST_RUN))


def stream(neighbour: fx.Node) -> Work:
    """A pointwise kernel of its own for a node that Inductor would have fused: its elements are read and written once more."""
    value = g.value(neighbour)
    sizes = g.hints(value.shape) or [1]
    device = " cpu" if value.device.type == "cpu" else ""
    return Work(f"stream{device}", {"bytes": 2.0 * math.prod(sizes) * value.itemsize}, {"log2 itemsize": log2(value.itemsize)})
