"""The statistics of the bench: medians and geometric means from the standard library, confidence intervals from scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from fusebackend.bench.extras import optional


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; nan of no ratios."""
    ratios = list(ratios)
    return statistics.geometric_mean(ratios) if ratios else math.nan


def relative_uncertainty(times: Sequence[float], others: Sequence[float]) -> float:
    """How well the median of ``times / others`` is known, as a part of it.

    Half the interquartile range of the ratios, over their median and the square root of their number. Infinite for fewer than
    three pairs.
    """
    if len(times) < 3:
        return math.inf
    ratios = [a / b for a, b in zip(times, others)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return (high - low) / 2 / median / math.sqrt(len(ratios))


def geometric_mean_interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The geometric mean and the ends of its confidence interval: Student's t interval of the logarithms.

    Args:
        ratios: at least two, independent, their logarithms about normally distributed.

    Raises:
        MissingExtra: scipy is not installed.
    """
    scipy_stats = optional("scipy.stats", "a confidence interval")
    logarithms = [math.log(ratio) for ratio in ratios]
    quantile = scipy_stats.t.ppf((1 + confidence) / 2, df=len(ratios) - 1)
    mean, margin = statistics.fmean(logarithms), float(quantile * scipy_stats.sem(logarithms))
    return math.exp(mean), math.exp(mean - margin), math.exp(mean + margin)
