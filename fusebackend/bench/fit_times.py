"""Fits the models of a calibration to timed sites.

Rates by least squares of logarithms (robust: a few sites are odd), the correction by extremely randomized trees, its spread by sites that a
fit did not see.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusebackend.bench.calibration_sites import Measured
from fusebackend.bench.extras import optional
from fusebackend.profitability.time_model import TimeModel, features
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Work

#: Fewer sites of a kind are not fitted.
LEAST_SITES = 12
#: So many do without those where something else stands beside the kind.
_MANY_SITES = 60

#: Of several kernels the time of some is known where all take this many times as long as the others by themselves: well where it is three
#: times, so that an error in these is half as large in what is left.
_MUCH_MORE, _LEAST_MORE = 3.0, 1.3

#: What was found speaks against an older model that errs by so many times what a fit to others of it does.
_SPEAKS_AGAINST = 2.0

#: In one kind of generated kernel arithmetic is as fast as in another, up to this factor. A lower rate means that something slow went with
#: the quantity in all sites that were drawn; where that is absent, the model would be wrong by a hundred times.
_GENERATED, _ARITHMETIC, _SLOWER = "triton", ("operations", "divisions", "functions"), 2.0
_NO_LIMITS: Mapping[str, float] = {}

#: How often the time of different kernels is divided among them anew.
_DIVISIONS = 5

_TREES, _LEAST_IN_LEAF, _FOLDS = 24, 2, 5
#: The part of the errors on unseen sites that lies within the interval on each side.
_INSIDE = 0.9


def check_extras() -> None:
    """Raises MissingExtra where a package that fitting needs is not installed."""
    for module in ("numpy", "scipy.optimize", "sklearn.ensemble"):
        optional(module, "fitting a calibration", "calibrate")


@dataclasses.dataclass
class Sample:
    """One kernel whose time is known: the ways that could have been chosen for it, microseconds, and the site that tells.

    Kernels of one site are seen together by a fit, or not at all. By default a sample has a site of its own.
    """

    ways: list[Work]
    us: float
    site: object = dataclasses.field(default_factory=object)


@dataclasses.dataclass
class _Together:
    """Kernels, each in the ways that could have been chosen for it, that took ``us`` together."""

    kernels: list[list[Work]]
    us: float

    @property
    def kinds(self) -> set[str]:
        return {ways[0].kind for ways in self.kernels}

    @property
    def are_equal(self) -> bool:
        return all(k == self.kernels[0] for k in self.kernels)

    def divided(self, models: Mapping[str, TimeModel]) -> list[float]:
        """The time of each: as the rates of ``models`` have it, or equal parts. Of a kernel that is shared with other sites the whole."""
        known = models and not self.are_equal
        expected = [min(map(models[w[0].kind].physical, w)) * w[0].share if known else w[0].share for w in self.kernels]
        return [self.us * e / sum(expected) / ways[0].share for e, ways in zip(expected, self.kernels)]


def samples(measured: Sequence[Measured], models: Mapping[str, TimeModel]) -> dict[str, list[Sample]]:
    """By kind: what sites tell of those that ``models`` do not have, apart from the time of the others.

    First of kinds that are the only unknown ones of half of their sites, or of many: the others will tell more once what stands beside them
    is known. Then of those of fewer; and if there are none, of those that stand beside one another.
    """
    met = collections.Counter(kind for m in measured for kind in {k[0].kind for k in m.kernels})
    for more in (_MUCH_MORE, _LEAST_MORE):
        sites = _with_unknown(measured, models, more)
        alone = _divided([s for s in sites if len(s.kinds) == 1])
        mostly = {kind: found for kind, found in alone.items() if len(found) >= min(_MANY_SITES, met[kind] / 2)}
        if alone:
            return mostly or alone
    return _divided(sites)


def _with_unknown(measured: Sequence[Measured], models: Mapping[str, TimeModel], more: float) -> list[_Together]:
    """The kernels of each site that ``models`` do not have, with the time that the others leave, where all take ``more`` times as long as
    these."""
    sites = []
    for m in measured:
        unknown = [k for k in m.kernels if k[0].kind not in models]
        try:
            known = sum(models[k[0].kind].time(k[0]).expected * k[0].share for k in m.kernels if k[0].kind in models)
        except Unfit:
            continue
        if unknown and m.us > more * known:
            sites.append(_Together(unknown, m.us - known))
    return sites


def _divided(sites: Sequence[_Together]) -> dict[str, list[Sample]]:
    """A sample for each kernel, of kinds with enough sites. The time of kernels that differ is divided by rates, which are fitted to the
    parts, again and again."""
    while True:
        count = collections.Counter(kind for site in sites for kind in site.kinds)
        enough = [site for site in sites if all(count[kind] >= LEAST_SITES for kind in site.kinds)]
        if len(enough) == len(sites):
            break
        sites = enough
    parts = _parts(sites, {})
    for _ in range(0 if all(s.are_equal for s in sites) else _DIVISIONS):
        parts = _parts(sites, {kind: _fit_rates(found) for kind, found in parts.items()})
    return parts


def _parts(sites: Sequence[_Together], models: Mapping[str, TimeModel]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = collections.defaultdict(list)
    for i, site in enumerate(sites):
        kernels = list(zip(site.kernels, site.divided(models)))
        for ways, us in kernels[:1] if site.are_equal else kernels:
            found[ways[0].kind].append(Sample(ways, us, i))
    return dict(found)


def fit_all(
    measured: Sequence[Measured],
    known: Mapping[str, TimeModel] | None = None,
    bases: Sequence[Mapping[str, TimeModel]] = (),
    before: Mapping[str, TimeModel] | None = None,
) -> dict[str, TimeModel]:
    """A model for each kind of work that has enough sites.

    Args:
        known: models of kinds that are not fitted again.
        bases: models of other devices, with rates that are a guess at this one's, to begin with where that errs less.
        before: models of this device, of other sites. One of more sites than were found now, which erred less on those that it was not
            fitted to, stays unless what was found speaks against it: some kinds of work stand beside much else in what was drawn.
    """
    models: dict[str, TimeModel] = dict(known or {})
    while True:
        new = samples(measured, models)
        if not new:
            return {k: m for k, m in models.items() if k not in (known or {})}
        for kind, found in new.items():
            least = _least_rates(kind, {**(before or {}), **models})
            fitted, old = fit(found, [basis[kind] for basis in bases if kind in basis], least), (before or {}).get(kind)
            models[kind] = old if old is not None and _tells_more(old, fitted, found) else fitted


def _least_rates(kind: str, models: Mapping[str, TimeModel]) -> dict[str, float]:
    """How slow arithmetic may be in a generated kernel, by the median of other kinds."""
    others = [m.rates for other, m in models.items() if other != kind and other.startswith(_GENERATED)]
    if not kind.startswith(_GENERATED) or not others:
        return {}
    rates = {name: [r[name] for r in others if name in r] for name in _ARITHMETIC}
    return {name: statistics.median_low(found) / _SLOWER for name, found in rates.items() if found}


def _tells_more(old: TimeModel, fitted: TimeModel, found: Sequence[Sample]) -> bool:
    """Whether an older model of this device is better than one that was fitted to ``found``, of which it explains what can be explained."""
    if old.count <= len(found) or old.error >= fitted.error:
        return False
    errors = []
    for s in found:
        with contextlib.suppress(Unfit):
            errors.append(abs(math.log(old.time(min(s.ways, key=old.physical)).expected / s.us)))
    return bool(errors) and math.fsum(errors) / len(errors) < _SPEAKS_AGAINST * fitted.error


def fit(found: Sequence[Sample], bases: Sequence[TimeModel] = (), least: Mapping[str, float] = _NO_LIMITS) -> TimeModel:
    """The model of one kind: with one of the bases or without, whichever errs least on sites that it was not fitted to.

    Args:
        least: lower limits of rates.
    """
    ways: list[Callable[[Sequence[Sample]], TimeModel]] = [functools.partial(_fit_once, least=least)]
    for basis in bases:  # few sites tell how fast the device is, but not how that depends on shapes
        ways += [functools.partial(way, basis=basis, least=least) for way in (_fit_once, _fit_rates)]
    model = min((_judged(found, way) for way in ways), key=lambda model: model.error)
    return functools.reduce(lambda model, basis: _guessing(model, basis.rates), bases, model)


def _guessing(model: TimeModel, rates: Mapping[str, float]) -> TimeModel:
    """The model with guesses at the rates that it lacks."""
    guessed = sorted({*model.guessed, *(set(rates) - set(model.rates))})
    return dataclasses.replace(model, rates={**{n: float(f"{rate:.5g}") for n, rate in rates.items()}, **model.rates}, guessed=guessed)


def _judged(found: Sequence[Sample], way: Callable[[Sequence[Sample]], TimeModel]) -> TimeModel:
    """The model that ``way`` fits to all, with its errors on what it did not see."""
    numpy: Any = optional("numpy", "fitting a calibration", "calibrate")
    sites = dict.fromkeys(s.site for s in found)
    fold_of = dict(zip(sites, _shuffled(len(sites))))
    folds = numpy.array([fold_of[s.site] for s in found])
    errors, deviations = numpy.full(len(found), numpy.nan), numpy.zeros(len(found))
    for fold in range(_FOLDS):
        model = dataclasses.replace(way([s for s, f in zip(found, folds) if f != fold]), spread=1.0)
        for i in numpy.flatnonzero(folds == fold):
            with contextlib.suppress(Unfit):  # the only site with some quantity
                work = min(found[i].ways, key=model.physical)
                time = model.time(work)
                errors[i], deviations[i] = math.log(time.expected / found[i].us), time.half_width
    errors, deviations = errors[~numpy.isnan(errors)], deviations[~numpy.isnan(errors)]
    # The least noise under which the trees' deviations explain the errors evenly, then how many of these the interval takes.
    noise = float(numpy.median(numpy.abs(errors)))
    spread = float(numpy.quantile(numpy.abs(errors) / numpy.hypot(deviations, noise), 2 * _INSIDE - 1))
    return dataclasses.replace(way(found), spread=spread, noise=noise, count=len(found), error=float(numpy.abs(errors).mean()))


def _shuffled(count: int) -> Any:
    numpy: Any = optional("numpy", "fitting a calibration", "calibrate")
    folds = numpy.arange(count) % _FOLDS
    numpy.random.default_rng(0).shuffle(folds)
    return folds


def _fit_once(found: Sequence[Sample], basis: TimeModel | None = None, least: Mapping[str, float] = _NO_LIMITS) -> TimeModel:
    numpy: Any = optional("numpy", "fitting a calibration", "calibrate")
    ensemble: Any = optional("sklearn.ensemble", "fitting a calibration", "calibrate")
    physical = _fit_rates(found, basis, least)
    works = [min(s.ways, key=physical.physical) for s in found]
    base = [physical.physical(w) for w in works]
    points = [features(w, b) for w, b in zip(works, base)]
    names = sorted({n for p in points for n in p})
    X = numpy.array([[p.get(n, 0.0) for n in names] for p in points])
    y = numpy.log([s.us for s in found]) - numpy.log(base) - [physical.correction(w, b)[0] for w, b in zip(works, base)]
    forest = ensemble.ExtraTreesRegressor(_TREES, min_samples_leaf=_LEAST_IN_LEAF, max_features=0.7, random_state=0).fit(X, y)
    trees = json.dumps([_as_lists(e.tree_, 0) for e in forest.estimators_], separators=(",", ":"))
    return dataclasses.replace(physical, features=names, trees=trees)


def _as_lists(tree: Any, node: int) -> Any:
    if tree.children_left[node] < 0:
        return round(float(tree.value[node][0][0]), 4)
    low, high = (_as_lists(tree, child[node]) for child in (tree.children_left, tree.children_right))
    return [int(tree.feature[node]), float(f"{tree.threshold[node]:.5g}"), low, high]


def _fit_rates(found: Sequence[Sample], basis: TimeModel | None = None, least: Mapping[str, float] = _NO_LIMITS) -> TimeModel:
    """The rates alone, none below ``least``: with a basis near its own, and times its correction."""
    numpy: Any = optional("numpy", "fitting a calibration", "calibrate")
    optimize: Any = optional("scipy.optimize", "fitting a calibration", "calibrate")
    names = sorted({n for s in found for w in s.ways for n, q in w.quantities.items() if q > 0})
    most = max(len(s.ways) for s in found)
    amounts, corrections = numpy.full((len(found), most, len(names)), numpy.nan), numpy.zeros((len(found), most))
    for i, s in enumerate(found):
        for j, w in enumerate(s.ways):
            amounts[i, j] = [w.quantities.get(n, 0.0) for n in names]
            with contextlib.suppress(Unfit):  # a quantity that was not met there
                corrections[i, j] = 0.0 if basis is None else basis.correction(w, basis.physical(w))[0]
    us = numpy.array([s.us for s in found])
    log_us = numpy.log(us)
    # Begin with each quantity explaining the slowest tenth of what it occurs in.
    typical = numpy.array(
        [numpy.nanquantile(numpy.where(amounts[:, 0, k] > 0, amounts[:, 0, k] / us, numpy.nan), 0.9) for k in range(len(names))]
    )
    begin = numpy.concatenate([[math.log(max(us.min() * 0.9, 1e-3)), 0.0], numpy.log(typical) + 0.7])
    near = numpy.zeros(len(begin))  # how much a logarithm's distance from the basis counts, where one site's error counts 1
    if basis is not None:
        begin[:2], near[:2] = [math.log(max(basis.start, 1e-3)), math.log(max(basis.power - 1, 1e-3))], 1.0
        for k, name in enumerate(names):
            if name in basis.rates:
                begin[2 + k], near[2 + k] = math.log(basis.rates[name]), 1.0
    lowest = numpy.array([math.log(least[name]) if name in least else -math.inf for name in names])
    begin[2:] = numpy.maximum(begin[2:], lowest + 1e-6)

    def errors(parameters: Any) -> Any:
        start, power = numpy.exp(parameters[0]), 1 + numpy.exp(parameters[1])
        terms = amounts / numpy.exp(parameters[2:])
        largest = numpy.maximum(terms.max(axis=2, keepdims=True), 1e-9)
        sums = largest[..., 0] * ((terms / largest) ** power).sum(axis=2) ** (1 / power)
        expected = numpy.nanmin(numpy.log(start + sums) + corrections, axis=1)
        return numpy.concatenate([expected - log_us, near * (parameters - begin)])

    limits = begin - 12, begin + 12
    limits[1][0] = max(math.log(us.min()), begin[0])
    limits[0][2:] = numpy.maximum(limits[0][2:], lowest)
    begin_within = numpy.minimum(begin, limits[1] - 1e-6)
    best = optimize.least_squares(errors, begin_within, bounds=limits, loss="soft_l1", f_scale=0.1, max_nfev=200)
    start, power = math.exp(best.x[0]), 1 + math.exp(best.x[1])
    rates = {n: float(f"{math.exp(r):.5g}") for n, r in zip(names, best.x[2:])}
    model = TimeModel(float(f"{start:.4g}"), rates, float(f"{power:.4g}"), basis=basis)
    works = [min(s.ways, key=model.physical) for s in found]
    guesses = {n: rates["bytes"] for w in works for n in w.quantities if "bytes" in n and "bytes" in rates}
    shapes = {n: [w.shape.get(n, 0.0) for w in works] for n in sorted({n for w in works for n in w.shape})}
    seen = {n: [round(min(values), 3), round(max(values), 3)] for n, values in shapes.items()}
    return _guessing(dataclasses.replace(model, seen=seen), guesses | (dict(basis.rates) if basis is not None else {}))
