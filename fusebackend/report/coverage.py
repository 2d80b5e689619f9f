"""What part of a program was rewritten."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusebackend.report.model import Report


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The operators that were replaced and all there were, views aside, and the bytes that these read and write.

    Bytes stand for time: most operators take as long as their memory traffic, and no other yardstick is the same on every device. They
    are counted as if nothing was fused, at the sizes with which the program was traced.
    """

    replaced_operators: int
    operators: int
    replaced_bytes: int
    moved_bytes: int

    @property
    def of_operators(self) -> float:
        return self.replaced_operators / self.operators if self.operators else 0.0

    @property
    def of_bytes(self) -> float:
        return self.replaced_bytes / self.moved_bytes if self.moved_bytes else 0.0

    def __str__(self) -> str:
        operators = f"{self.replaced_operators} of {self.operators} operators ({_percent(self.of_operators)})"
        return f"{operators}, which move {_percent(self.of_bytes)} of the bytes"


def coverage(report: Report) -> Coverage | None:
    """The coverage of a report; None if it was kept by a version that did not count."""
    # Forward and backward are counted by themselves, after what was replaced while they were still together.
    apart = [graph for graph in report.graphs if not is_together(graph.name)]
    if not any(graph.operators for graph in apart):
        return None
    before = [s for s in report.substitutions if is_together(s.graph)]
    return Coverage(
        sum(s.replaced_operators for s in report.substitutions),
        sum(g.operators for g in apart) + sum(s.replaced_operators - s.new_operators for s in before),
        sum(s.replaced_bytes for s in report.substitutions),
        sum(g.moved_bytes for g in apart) + sum(s.replaced_bytes - s.new_bytes for s in before),
    )


def is_together(graph: str) -> bool:
    """Whether a graph is one of the joint level: its nodes come again in the forward or backward graph that it becomes."""
    return re.search(r"\b(joint|joint level\))( #\d+)?$", graph) is not None


def _percent(part: float) -> str:
    return "0 %" if part == 0 else "< 1 %" if part < 0.01 else f"{100 * part:.0f} %"
