"""How long a kind of work takes: a formula of physical rates, times a correction that depends on shapes.

    time = start + (sum_i (quantity_i / rate_i)^p)^(1/p), all times exp(correction)

What limits a kernel, the memory, the caches, the arithmetic, overlaps with the rest: ``p`` says how well. The correction is the mean of
regression trees (P. Geurts, D. Ernst, L. Wehenkel, Extremely randomized trees, 2006); how far the trees differ says how sure it is. Where
sites of another device explain this one's, their correction is added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Interval, Work
from fusebackend.rewriting.workload import log2

#: A tree: the value of a leaf, or [index of a feature, threshold, tree at or below it, tree above it].
Tree = float | list[Any]

#: How many times wider an interval is at most where work is unlike what was calibrated.
_UNSEEN = 4.0


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """The model of one kind of work.

    Attributes:
        start: microseconds that it takes to do nothing.
        rates: amounts a microsecond, by the name of the quantity.
        power: of the sum.
        features: the names of what the trees look at: of quantities and of numbers of the shape.
        trees: the correction, a logarithm each: a list in JSON, which is read once it is used. A process uses few kinds of work.
        seen: the least and the largest of each number of the shape that it was fitted to.
        guessed: the quantities that no site had any of: bytes, which are taken to move as others do.
        spread: half the interval's width, as a logarithm, is this many times the trees' standard deviation and ``noise``, added as squares.
        noise: the error that is left where the trees agree, as a logarithm.
        count, error: how many sites it was fitted to, and the mean error on sites that it was not fitted to, as a logarithm.
        basis: a model of this kind on another device, under another torch, or of other sites, whose correction is added to this one's: by
            how much shapes make kernels slower than their rates differs less between GPUs than the rates do.
    """

    start: float
    rates: Mapping[str, float]
    power: float
    features: Sequence[str] = ()
    trees: str = ""
    seen: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    guessed: Sequence[str] = ()
    spread: float = 1.0
    noise: float = 0.0
    count: int = 0
    error: float = 0.0
    basis: TimeModel | None = None

    @property
    def bases(self) -> int:
        """How many models stand behind this one, each the basis of the one before."""
        return 0 if self.basis is None else 1 + self.basis.bases

    def scaled(self, scale: float, widened: float = 1.0) -> TimeModel:
        """This model of a device that takes ``scale`` times as long for everything, with intervals that are ``widened``."""
        rates = {name: rate / scale for name, rate in self.rates.items()}
        return dataclasses.replace(self, start=self.start * scale, rates=rates, spread=self.spread * widened)

    def physical(self, work: Work) -> float:
        """Microseconds by the rates alone.

        Raises:
            Unfit: the work has a quantity whose rate is not known.
        """
        unknown = [name for name, amount in work.quantities.items() if amount > 0 and name not in self.rates]
        if unknown:
            raise Unfit(f"how long {', '.join(unknown)} of {work.kind!r} take was not calibrated: python -m fusebackend calibrate")
        terms = [amount / self.rates[name] for name, amount in work.quantities.items() if amount > 0]
        largest = max(terms, default=0.0)
        if not largest > 0:
            return self.start
        return self.start + largest * sum((term / largest) ** self.power for term in terms) ** (1 / self.power)

    def time(self, work: Work, widened: float = 1.0) -> Interval:
        """Microseconds. ``widened``: the interval's width is multiplied by it.

        Raises:
            Unfit: as for :meth:`physical`.
        """
        physical = self.physical(work)
        correction, deviation = self.correction(work, physical)
        half_width = widened * self._unlike(work) * self.spread * math.hypot(deviation, self.noise)
        return Interval.around(physical * math.exp(correction), half_width)

    def correction(self, work: Work, physical: float) -> tuple[float, float]:
        """The logarithm by which the work takes longer than its rates say, ``physical``, and how far the trees differ about it."""
        values = [0.0]
        if self.trees:
            known = features(work, physical)
            point = [known.get(name, 0.0) for name in self.features]
            values = [_evaluate(tree, point) for tree in self._forest]
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))  # statistics.pstdev, which takes fractions, is slow
        if self.basis is not None:
            with contextlib.suppress(Unfit):  # a quantity that was not met there
                other_mean, other_deviation = self.basis.correction(work, self.basis.physical(work))
                return mean + other_mean, math.hypot(deviation, other_deviation)
        return mean, deviation

    @functools.cached_property
    def _forest(self) -> list[Tree]:
        try:
            return json.loads(self.trees)
        except ValueError as error:
            raise Unfit(f"a calibration is damaged: {error}") from error

    def _unlike(self, work: Work) -> float:
        """How many times wider the interval is: by as much as numbers of the shape lie outside what was met, which are flags or logarithms
        to base 2, and twofold for a rate that is a guess."""
        values = ((work.shape.get(name, 0.0), low, high) for name, (low, high) in self.seen.items())
        distance = sum(max(0.0, low - value, value - high) for value, low, high in values)
        guesses = sum(work.quantities.get(name, 0.0) > 0 for name in self.guessed)
        return min(1.0 + distance + guesses, _UNSEEN)


def features(work: Work, physical: float) -> dict[str, float]:
    """What the correction may depend on: the logarithms of the quantities and of the physical time, and the shape."""
    return {**{f"log2 {n}": log2(q) for n, q in work.quantities.items()}, **work.shape, "log2 time": log2(physical)}


def _evaluate(tree: Tree, point: Sequence[float]) -> float:
    while isinstance(tree, list):
        index, threshold, low, high = tree
        tree = low if point[index] <= threshold else high
    return tree
