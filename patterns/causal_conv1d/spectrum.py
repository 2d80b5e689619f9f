"""What a complex value of a joint graph is, in terms of Fourier transforms: a sum of products of transforms of zero-padded real rows.

It is kept as an einsum is written: with a label for each dimension.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from torch import fx

from fusebackend import fx_utils as g

#: The label of the dimension that is transformed. Others are (node, dim), of the rows that first had them, or None where the size is 1.
TIME = "time"
Labels = tuple[Any, ...]


class Bins(enum.Enum):
    """Which bins of a transform of real rows a value holds; the others follow from these."""

    HALF = "n // 2 + 1 of them"
    DOUBLED = "the same, all but the first and (where n is even) the last doubled"
    ONE_SIDED = "the same, and zeros in place of the others"
    ALL = "all of them"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Real rows along dim ``axis`` of ``node``, behind ``offset`` zeros, and before as many zeros as the transform's length leaves."""

    node: fx.Node
    axis: int
    offset: int = 0

    @property
    def length(self) -> Any:
        return g.value(self.node).shape[self.axis]


@dataclasses.dataclass(frozen=True)
class Factor:
    """The transform of ``rows``, whose dims have these labels; ``conjugated`` or not."""

    rows: Rows
    labels: Labels
    conjugated: bool = False

    def relabeled(self, new: dict[Any, Any]) -> Factor:
        return dataclasses.replace(self, labels=_relabeled(self.labels, new))


@dataclasses.dataclass(frozen=True)
class Term:
    """A product of one or two transforms, times ``scale * n ** power``. Labels of factors that the value lacks are summed over."""

    factors: tuple[Factor, ...]
    scale: float = 1.0
    power: Fraction = Fraction(0)

    def relabeled(self, new: dict[Any, Any]) -> Term:
        return dataclasses.replace(self, factors=tuple(f.relabeled(new) for f in self.factors))

    def scaled(self, scale: float, power: Fraction = Fraction(0)) -> Term:
        return dataclasses.replace(self, scale=self.scale * scale, power=self.power + power)


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """A sum of terms: ``bins`` of a transform of ``n`` samples, or what an inverse transform made of all bins (``bins`` is None)."""

    terms: tuple[Term, ...]
    labels: Labels
    n: Any
    bins: Bins | None

    @property
    def is_product(self) -> bool:
        return any(len(t.factors) > 1 for t in self.terms)

    def mapped(self, change: Callable[[Term], Term]) -> Spectrum:
        return dataclasses.replace(self, terms=tuple(map(change, self.terms)))

    def relabeled(self, new: dict[Any, Any]) -> Spectrum:
        return dataclasses.replace(self.mapped(lambda t: t.relabeled(new)), labels=_relabeled(self.labels, new))


class Unreadable(Exception):
    """A value is no sum of products of transforms.

    Attributes:
        node: where that shows.
        near: whether a product of transforms, or what looks like one, is part of it.
    """

    def __init__(self, reason: str, node: fx.Node, near: bool = False):
        super().__init__(reason)
        self.reason, self.node, self.near = reason, node, near


def size_of_label(label: Any) -> Any:
    node, dim = label
    return g.value(node).shape[dim]


def _relabeled(labels: Labels, new: dict[Any, Any]) -> Labels:
    return tuple(new.get(x, x) for x in labels)


def broadcast(a: Labels, b: Labels) -> Labels:
    width = max(len(a), len(b))
    a, b = (None,) * (width - len(a)) + a, (None,) * (width - len(b)) + b
    return tuple(x if x is not None else y for x, y in zip(a, b))
