"""Works that are drawn at random, and the times of a device whose rates are known."""

from __future__ import annotations

import math
import random

from fusebackend.bench.calibration_sites import Measured
from fusebackend.bench.fit_times import Sample
from fusebackend.rewriting.pattern import Work

START, RATES, POWER = 5.0, {"bytes": 3000.0, "flops": 50_000.0}, 2.0


def drawn(count, seed=0, noise=0.05, kind="k", hidden=0.0):
    """Works and times by the formula, each times exp of a normal number. ``hidden``: an efficiency that only the shape tells."""
    draw = random.Random(seed)
    for _ in range(count):
        amounts = {name: rate * 2 ** draw.uniform(0, 12) for name, rate in RATES.items()}
        run = draw.uniform(0, 8)
        us = START + sum((amount / RATES[name]) ** POWER for name, amount in amounts.items()) ** (1 / POWER)
        yield Work(kind, amounts, {"log2 run": run}), us * math.exp(hidden * (run < 4) + draw.gauss(0, noise))


def samples(*args, **kwargs):
    return [Sample([work], us) for work, us in drawn(*args, **kwargs)]


def sites(count, family="f", **kwargs):
    return [Measured(family, f"site {i}", "ours", [[work]], us) for i, (work, us) in enumerate(drawn(count, **kwargs))]
