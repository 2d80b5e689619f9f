"""What rewriting asks of whoever decides whether a replacement pays. ``fusebackend.profitability.policy`` implements it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import fx

from fusebackend.rewriting.outcome import Verdict
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A legal match in the graph called ``graph``, with the pattern's estimate of whether it pays."""

    pattern: Pattern
    graph: str
    match: Match
    estimate: Estimate


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided about a proposal.

    Attributes:
        refusal: why the match is not applied; None if it is.
        verdict: what a measurement said, or why there is none; None if that needs no mention in the report.
    """

    refusal: Reject | None = None
    verdict: Verdict | None = None


class ProfitabilityPolicy(Protocol):
    """Decides which legal matches are applied. No method may change the graph."""

    def estimate(self, pattern: Pattern, match: Match) -> Estimate:
        """Whether the match pays, as far as that can be told without timing it."""

    def refuse_unbuilt(self, proposal: Proposal) -> Reject | None:
        """Why the match is not applied, if that can be told before the replacement is built; otherwise None."""

    def building(self, proposal: Proposal) -> AbstractContextManager[None]:
        """A block in which the replacement is built, which may compile kernels."""

    def decide(self, proposal: Proposal, new_outputs: Sequence[fx.Node], emitted: Sequence[fx.Node]) -> Decision:
        """The decision, once the replacement is built.

        Args:
            new_outputs: the nodes that would take the place of the match's outputs.
            emitted: all nodes of the replacement. They stand in the graph beside the original.
        """

    def close(self) -> None:
        """Called after each graph."""
