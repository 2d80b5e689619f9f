"""What a search for a pattern has found: complete matches, and those that are still being made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g

Views = tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class InputBinding:
    """What an input of the pattern stands for: ``node`` of the searched graph, with ``views`` applied to it in this order."""

    node: fx.Node
    views: Views = ()

    @property
    def shape(self) -> torch.Size:
        return g.value(self.views[-1] if self.views else self.node).shape


@dataclasses.dataclass(frozen=True)
class SubgraphMatch:
    """A complete match.

    Attributes:
        nodes: the node of the searched graph for each operator of the pattern.
        inputs: what each input of the pattern stands for.
        scalars: the value of each named number.
        views: the views and casts between the matched nodes; the replacement applies the views to the inputs.
        other_terms: terms of the sum at the anchor that are not the pattern's.
        sums: the additions between the anchor and its terms.
        note: what the report says about the match, e.g. which roundings the replacement leaves out.
    """

    nodes: Mapping[fx.Node, fx.Node]
    inputs: Mapping[fx.Node, InputBinding]
    scalars: Mapping[str, Any]
    views: frozenset[fx.Node]
    other_terms: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class PartialMatch:
    """The assignments made so far. It is immutable, so backtracking needs no undo.

    Attributes:
        nodes: the node of the searched graph for each operator of the pattern, and the views that its result passes through.
        sizes: pairs of sizes that must be equal, the pattern's first, each with the node that has the second.
        casts: of the graph, that were seen through; and nodes that compute once more what another matched node does.
        others: see :class:`SubgraphMatch`.
    """

    nodes: Mapping[fx.Node, tuple[fx.Node, Views]] = dataclasses.field(default_factory=dict)
    inputs: Mapping[fx.Node, InputBinding] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: tuple[tuple[Any, Any, fx.Node], ...] = ()
    casts: tuple[fx.Node, ...] = ()
    other_terms: tuple[fx.Node, ...] = ()
    sums: tuple[fx.Node, ...] = ()
