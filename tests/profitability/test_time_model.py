"""The formula of a model of time, its correction by trees, and what it says of work that it was not fitted to."""

import json
import math

import pytest

from fusebackend.native.kept_files import decoded
from fusebackend.profitability.time_model import TimeModel, features
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Work


def test_one_quantity_takes_its_amount_over_its_rate():
    model = TimeModel(start=2.0, rates={"bytes": 100.0}, power=2.0)
    assert model.physical(Work("copy", {"bytes": 1000.0})) == pytest.approx(12.0)
    assert model.physical(Work("copy", {"bytes": 0.0})) == 2.0
    assert model.physical(Work("copy", {})) == 2.0


@pytest.mark.parametrize(("power", "expected"), [(1.0, 10 + 24), (2.0, 26.0), (50.0, 24.0)])
def test_the_power_says_how_well_quantities_overlap(power, expected):
    model = TimeModel(start=0.0, rates={"bytes": 1.0, "flops": 1.0}, power=power)
    assert model.physical(Work("x", {"bytes": 10.0, "flops": 24.0})) == pytest.approx(expected, rel=1e-6)


def test_large_amounts_do_not_overflow():
    model = TimeModel(start=0.0, rates={"bytes": 1e-3, "flops": 1e-3}, power=40.0)
    assert math.isfinite(model.physical(Work("x", {"bytes": 1e30, "flops": 1e29})))


def test_trees_correct_by_their_mean_and_their_spread_is_the_uncertainty():
    trees = [[0, 3.0, 0.0, math.log(2.0)], [0, 3.0, 0.0, math.log(8.0)]]
    model = TimeModel(1.0, {}, 1.0, features=["size"], trees=json.dumps(trees), spread=1.5, noise=0.3)
    small, large = (model.time(Work("x", {}, {"size": size})) for size in (2.0, 4.0))
    assert small.expected == 1.0 and small.half_width == pytest.approx(1.5 * 0.3)
    assert large.expected == pytest.approx(4.0)
    assert large.half_width == pytest.approx(1.5 * math.hypot(math.log(2.0), 0.3))
    assert large.low * large.high == pytest.approx(large.expected**2)
    assert model.time(Work("x", {}, {"size": 2.0}), widened=2.0).half_width == pytest.approx(2 * 1.5 * 0.3)


def test_damaged_trees_are_unfit():
    with pytest.raises(Unfit, match="damaged"):
        TimeModel(1.0, {}, 1.0, trees="[[0, 1.0").time(Work("x", {}))


def test_a_quantity_without_a_rate_is_not_taken_for_free():
    model = TimeModel(1.0, {"bytes": 1.0}, 1.0)
    assert model.physical(Work("x", {"bytes": 1.0, "atomics": 0.0})) == 2.0
    with pytest.raises(Unfit, match="atomics of 'x'"):
        model.physical(Work("x", {"bytes": 1.0, "atomics": 5.0}))


def test_a_shape_that_was_not_met_widens_the_interval():
    model = TimeModel(1.0, {}, 1.0, seen={"wgmma": [1.0, 1.0], "log2 m": [4.0, 10.0]}, noise=0.1)

    def width(**shape):
        return model.time(Work("x", {}, {name.replace("_", " "): value for name, value in shape.items()})).half_width

    assert width(wgmma=1.0, log2_m=10.0) == pytest.approx(0.1)
    assert width(wgmma=1.0, log2_m=10.5) == pytest.approx(0.15)
    assert width(wgmma=0.0, log2_m=6.0) == pytest.approx(0.2)
    assert width(wgmma=0.0, log2_m=3.0) == pytest.approx(0.3)
    assert width(wgmma=1.0, log2_m=30.0) == pytest.approx(0.4)


def test_a_quantity_whose_rate_is_a_guess_widens_the_interval():
    model = TimeModel(1.0, {"bytes": 1.0, "copied bytes": 1.0}, 1.0, guessed=["copied bytes"], noise=0.1)
    assert model.time(Work("x", {"bytes": 4.0, "copied bytes": 0.0})).half_width == pytest.approx(0.1)
    assert model.time(Work("x", {"bytes": 4.0, "copied bytes": 2.0})).half_width == pytest.approx(0.2)


def test_features_are_logarithms_of_quantities_and_numbers_of_the_shape():
    found = features(Work("x", {"bytes": 8.0, "none": 0.0}, {"dynamic": 1.0}), physical=4.0)
    assert found == {"log2 bytes": 3.0, "log2 none": -20.0, "dynamic": 1.0, "log2 time": 2.0}


def test_a_model_survives_json():
    model = TimeModel(
        1.0, {"bytes": 2.0}, 1.5, ["a"], "[[0, 1.0, -0.5, [0, 2.0, 0.1, 0.2]]]", {"a": [0.0, 3.0]}, ["b"], 1.2, 0.05, 30, 0.04
    )
    read = decoded(TimeModel, json.loads(json.dumps(vars(model))))
    work = Work("x", {"bytes": 4.0}, {"a": 1.5})
    assert read.time(work) == model.time(work)
