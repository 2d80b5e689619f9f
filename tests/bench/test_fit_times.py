"""Models that are fitted to times: what they recover, what stays of older ones, and what another device's tell."""

from __future__ import annotations

import dataclasses
import math

import pytest
from drawn_works import POWER, RATES, START, drawn, samples, sites

from fusebackend.bench import fit_times
from fusebackend.bench.calibration_sites import Measured
from fusebackend.bench.fit_times import LEAST_SITES, Sample
from fusebackend.profitability.time_model import TimeModel
from fusebackend.rewriting.pattern import Work

for _module in ("numpy", "scipy", "sklearn"):
    pytest.importorskip(_module, reason="the extra calibrate is not installed")

# ---- the fit ----


def test_it_recovers_what_made_the_times():
    model = fit_times.fit(samples(300, noise=0.02))
    assert model.rates == {name: pytest.approx(rate, rel=0.08) for name, rate in RATES.items()}
    assert model.power == pytest.approx(POWER, rel=0.15) and model.start == pytest.approx(START, rel=0.3)
    assert model.count == 300 and 0.01 < model.error < 0.04


def test_what_only_the_shape_tells_is_corrected():
    model = fit_times.fit(samples(300, hidden=0.7))
    for work, us in drawn(50, seed=1, hidden=0.7, noise=0.0):
        if abs(work.shape["log2 run"] - 4) > 0.5:
            assert model.time(work).expected == pytest.approx(us, rel=0.25)
    assert model.seen == {"log2 run": [pytest.approx(0, abs=0.2), pytest.approx(8, abs=0.2)]}


@pytest.mark.parametrize("noise", [0.03, 0.15])
def test_intervals_hold_for_unseen_sites_as_often_as_they_say(noise):
    model = fit_times.fit(samples(200, noise=noise, hidden=0.5))
    within = [model.time(w).low <= us <= model.time(w).high for w, us in drawn(300, seed=9, noise=noise, hidden=0.5)]
    assert 0.7 <= sum(within) / len(within) <= 0.95  # 80 % lie between the bounds that 90 % respect on either side


def test_of_several_ways_the_fastest_explains_the_time():
    found = []
    for work, us in drawn(150, noise=0.02):
        slower = Work(work.kind, {name: 7 * amount for name, amount in work.quantities.items()}, work.shape)
        found.append(Sample([slower, work], us))
    model = fit_times.fit(found)
    assert model.rates == {name: pytest.approx(rate, rel=0.1) for name, rate in RATES.items()}


def test_what_went_with_another_quantity_is_no_slower_than_in_other_kernels():
    """Of one kind of generated kernel the sites divide once a block, whose time that may seem to be. A site that divides a thousand times
    as often takes no thousand times as long."""

    def generated(kind, divisions_a_block, seed):
        for i, (work, _) in enumerate(drawn(80, seed=seed)):
            blocks = work.quantities["flops"] / 1000
            amounts = {"bytes": work.quantities["bytes"], "divisions": blocks * divisions_a_block}
            us = START + amounts["bytes"] / RATES["bytes"] + blocks / 50 + amounts["divisions"] / 5e6
            yield Measured("f", f"{kind} {i}", "inductor", [[Work(kind, amounts, work.shape)]], us)

    often = [site for kind in ("triton", "triton reduction") for site in generated(kind, 1e6, seed=1)]
    once = list(generated("triton normalization", 1, seed=2))
    models = fit_times.fit_all([*often, *once])
    assert models["triton"].rates["divisions"] == pytest.approx(5e6, rel=0.3)
    assert models["triton normalization"].rates["divisions"] >= models["triton"].rates["divisions"] / 2.1
    alone = fit_times.fit_all(once)["triton normalization"]
    assert alone.rates["divisions"] < 1e3, "by itself it would seem to be slow"


def test_a_site_of_several_kernels_tells_the_one_that_is_not_known():
    plain = sites(100, noise=0.01)
    both = []
    for i, ((known, known_us), (other, other_us)) in enumerate(zip(drawn(100, seed=1, noise=0), drawn(100, seed=2, noise=0, kind="other"))):
        both.append(Measured("f", f"both {i}", "inductor", [[known], [other]], known_us + other_us / 2))
    shares = [Measured(m.family, m.site, m.way, [m.kernels[0], [shared(m.kernels[1][0], 0.5)]], m.us) for m in both]
    models = fit_times.fit_all([*plain, *shares])
    assert set(models) == {"k", "other"}
    assert models["other"].rates == {name: pytest.approx(rate, rel=0.3) for name, rate in RATES.items()}


def shared(work, share):
    return Work(work.kind, work.quantities, work.shape, share)


def test_the_time_of_different_kernels_of_one_kind_is_divided_among_them():
    """A long one beside a short one: by halves the rates would be far off."""
    pairs = []
    for i, ((one, us), (other, other_us)) in enumerate(zip(drawn(120, seed=1, noise=0.02), drawn(120, seed=2, noise=0.02))):
        pairs.append(Measured("f", f"pair {i}", "inductor", [[one], [shared(other, 0.5)]], us + other_us / 2))
    found = fit_times.samples(pairs, {})["k"]
    assert len(found) == 240 and found[0].site == found[1].site != found[2].site
    assert found[0].us + found[1].us / 2 == pytest.approx(pairs[0].us)
    model = fit_times.fit_all(pairs)["k"]
    assert model.rates == {name: pytest.approx(rate, rel=0.2) for name, rate in RATES.items()}
    for work, us in drawn(50, seed=3, noise=0.0):
        if us > 10 * START:  # how long the shortest take, no pair tells
            assert model.time(work).expected == pytest.approx(us, rel=0.25)


def test_kinds_that_are_never_alone_are_told_apart_by_how_much_there_is_of_each():
    pairs = []
    for i, ((one, us), (other, other_us)) in enumerate(zip(drawn(150, seed=1, noise=0.02), drawn(150, seed=2, noise=0.02, kind="slow"))):
        pairs.append(Measured("f", f"pair {i}", "inductor", [[one], [other]], us + 3 * other_us))
    models = fit_times.fit_all(pairs)
    assert models["k"].rates == {name: pytest.approx(rate, rel=0.2) for name, rate in RATES.items()}
    assert models["slow"].rates == {name: pytest.approx(rate / 3, rel=0.2) for name, rate in RATES.items()}


def test_what_stands_beside_a_kind_of_few_sites_tells_nothing():
    rare = [Measured("f", str(i), "ours", [[w], [Work("rare", w.quantities)]], us) for i, (w, us) in enumerate(drawn(LEAST_SITES - 1))]
    others = [Measured("f", f"pair {i}", "ours", [[w], [Work("other", w.quantities)]], us) for i, (w, us) in enumerate(drawn(30))]
    assert fit_times.samples(rare, {}) == {}
    assert {kind: len(found) for kind, found in fit_times.samples([*rare, *others], {}).items()} == {"k": 30, "other": 30}


def test_fewer_sites_are_not_fitted():
    assert fit_times.fit_all(sites(LEAST_SITES - 1)) == {}
    assert fit_times.fit_all(sites(LEAST_SITES))["k"].count == LEAST_SITES


def test_a_quantity_that_one_site_alone_has_does_not_stop_the_fit():
    found = samples(40)
    work = found[3].ways[0]
    found[3] = Sample([Work(work.kind, {**work.quantities, "sorts": 1e4}, work.shape)], found[3].us + 100)
    assert set(fit_times.fit(found).rates) == {*RATES, "sorts"}


# ---- the basis: another device's model ----


def slower(found, times):
    return [Sample(s.ways, s.us * times) for s in found]


def test_few_sites_and_what_is_known_of_another_device_tell_how_shapes_matter():
    """Of a device half as fast, whose kernels lose as much for short runs."""
    other = fit_times.fit(samples(400, noise=0.02, hidden=0.7))
    few = slower(samples(LEAST_SITES + 4, seed=2, noise=0.02, hidden=0.7), 2)
    unseen = [(w, 2 * us) for w, us in drawn(100, seed=1, noise=0, hidden=0.7)]

    def mean_error(model):
        return sum(abs(math.log(model.time(w).expected / us)) for w, us in unseen) / len(unseen)

    begun, alone = fit_times.fit(few, [other.scaled(1.6)]), fit_times.fit(few)
    assert begun.basis is not None and alone.basis is None
    assert mean_error(begun) < 0.12 and 1.5 * mean_error(begun) < mean_error(alone)


def test_a_basis_that_misleads_is_not_taken():
    other = fit_times.fit(samples(400, noise=0.02, hidden=-3.0))
    found = samples(150, noise=0.02)
    assert fit_times.fit(found, [other]) == fit_times.fit(found)


def test_of_several_bases_that_which_errs_least_is_taken():
    misleads, tells = (fit_times.fit(samples(400, noise=0.02, hidden=h)) for h in (-3.0, 0.7))
    few = samples(LEAST_SITES + 4, seed=2, noise=0.02, hidden=0.7)
    for bases in ([misleads, tells], [tells, misleads]):
        assert fit_times.fit(few, bases).basis == tells


@pytest.mark.parametrize(
    "error, count, slower, stays",
    [
        (0.05, 400, 1.0, True),
        (0.05, 30, 1.0, False),
        (0.9, 400, 1.0, False),
        (0.05, 400, 3.0, False),
    ],
)
def test_what_more_sites_told_of_this_device_stays(error, count, slower, stays):
    """Unless what is found now errs less, or speaks against it: the device may be slower by now."""
    old = dataclasses.replace(fit_times.fit(samples(400, noise=0.02)), error=error, count=count)
    measured = [dataclasses.replace(m, us=slower * m.us) for m in sites(40, seed=1, noise=0.3)]
    (model,) = fit_times.fit_all(measured, before={"k": old, "unseen": old}).values()
    assert (model == old) is stays


def test_what_the_basis_alone_knows_is_a_guess():
    for rates in (RATES, {"bytes": 1.0, "flops": 1.0}):  # the basis is taken, or misleads
        model = fit_times.fit(samples(30, noise=0.02), [TimeModel(START, {**rates, "sorts": 10.0}, POWER)])
        assert model.rates["sorts"] == 10.0 and model.guessed == ["sorts"]
