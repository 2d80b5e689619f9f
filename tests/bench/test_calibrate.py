"""``calibrate``: the fit recovers what made synthetic times, its intervals hold, files are read and refused, decisions are judged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys

import pytest
import torch

from fusebackend.__main__ import main
from fusebackend.bench import calibrate, calibration_sites, fit_times
from fusebackend.bench.calibration_sites import Measured
from fusebackend.bench.fit_times import LEAST_SITES, Sample
from fusebackend.profitability import calibration
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.time_model import TimeModel
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.workload import log2

for _module in ("numpy", "scipy", "sklearn"):
    pytest.importorskip(_module, reason="the extra calibrate is not installed")

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


def test_a_fit_begins_with_those_that_ship(monkeypatch, timed, own_calibrations, tmp_path):
    """Scaled by what the driver says of both. Models with two others behind them are none, but serve where no sites were drawn."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(calibration, "FOLDER", folder)
    plain, nested = (
        TimeModel(8.0, {"bytes": 100.0}, 2.0),
        TimeModel(6.0, {"bytes": 1.0}, 2.0, basis=TimeModel(1.0, {}, 2.0, basis=TimeModel(1.0, {}, 2.0))),
    )
    for name, threads, models in (("near", 1.0, {"a": plain, "b": nested}), ("far", 32.0, {"a": nested, "b": plain, "c": plain})):
        data = {**PROVENANCE, "device": name, "sites": 9, "call": 0.0, "properties": {"threads": threads}}
        (folder / f"{name}.json").write_text(json.dumps({**data, "models": {k: dataclasses.asdict(m) for k, m in models.items()}}))
    began = []
    fit_all = fit_times.fit_all
    monkeypatch.setattr(fit_times, "fit_all", lambda measured, bases, **how: began.append(bases) or fit_all(measured, bases=bases, **how))
    assert main(["calibrate", "--from", str(timed(sites(40, kind="a")))]) == 0
    (bases,) = began
    near, far = bases
    assert {kind: m.start for kind, m in near.items()} == {"a": 4.0} and near["a"].rates == {"bytes": 200.0}
    assert {kind: m.start for kind, m in far.items()} == {"b": pytest.approx(128), "c": pytest.approx(128)}
    _, written = calibration._read(own_calibrations / "own.json")
    assert written.models["a"].count == 40 and written.models["b"].start == 3.0 and written.models["c"].start == pytest.approx(128)
    assert (
        written.models["b"].spread == 4 * nested.spread  # another device's, and kernels may be others
    )


# ---- files ----

PROVENANCE = {
    **{"format": calibration.FORMAT, "type": "cpu", "device": calibration.device_name(torch.device("cpu"))},
    **{"torch_version": torch.__version__, "date": "2026-01-01", "properties": {"threads": 2.0}, "minutes": 1.0},
}


@pytest.fixture
def timed(tmp_path):
    """A file of sites, as ``--sites`` writes it."""

    def write(measured, **changes):
        path = tmp_path / "sites.jsonl"
        calibrate.write_sites(path, {**PROVENANCE, **changes}, measured)
        return path

    return write


@pytest.fixture(autouse=True)
def own_calibrations(monkeypatch, tmp_path):
    """The folder of the user's own calibrations: an empty one. None ship."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setattr(calibration, "_own_folder", lambda: folder)
    monkeypatch.setattr(calibration, "own_file", lambda device, version: folder / "own.json")
    monkeypatch.setattr(calibration, "FOLDER", tmp_path / "none")
    calibration.forget()
    yield folder
    calibration.forget()


def test_sites_survive_a_file(timed):
    measured = [*sites(3), Measured("g", "two", "inductor", [[Work("a", {"x": 1.0}, {"y": -2.5}, 0.25)] * 2, []], 7.25)]
    assert calibrate.read_sites([timed(measured)]) == (PROVENANCE, measured)


def test_sites_only_are_timed_and_written(monkeypatch, tmp_path, capsys):
    measured = [*sites(5), Measured(calibration_sites.HOST, "a call", "ours", [], 3.0)]
    asked = []

    def measure(families, minutes, seed, device, progress):
        asked.append((families, minutes, seed, device.type))
        progress("compiling")
        yield from measured

    monkeypatch.setattr(calibration_sites, "measure", measure)
    path = tmp_path / "s.jsonl"
    arguments = ["--family", "permute", "--minutes", "0.5", "--seed", "7", "--device", "cpu", "--sites", str(path)]
    assert main(["calibrate", *arguments]) == 0
    assert asked == [(["permute"], 0.5, 7, "cpu")] and "5 sites" in capsys.readouterr().out
    provenance, read = calibrate.read_sites([path])
    assert read == measured and provenance["device"] == PROVENANCE["device"] and provenance["seed"] == 7


def test_what_was_timed_before_an_interruption_is_in_the_file(monkeypatch, tmp_path):
    measured = sites(5)

    def measure(families, minutes, seed, device, progress):
        yield from measured
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration_sites, "measure", measure)
    path = tmp_path / "sites.jsonl"
    assert main(["calibrate", "--device", "cpu", "--sites", str(path)]) == 130
    assert calibrate.read_sites([path])[1] == measured


def test_a_fit_is_written_and_in_use_from_then_on(timed, own_calibrations, capsys):
    host = [Measured(calibration_sites.HOST, "a call", way, [], us) for way, us in (("ours", 9.5), ("inductor", 7.25))]
    assert calibration.of_device(torch.device("cpu")) is None
    assert main(["calibrate", "--from", str(timed([*sites(40), *host]))]) == 0
    printed = capsys.readouterr().out
    assert "mean error" in printed and "40 sites" in printed and str(own_calibrations / "own.json") in printed
    found = calibration.of_device(torch.device("cpu"))
    assert found.sites == 40 and found.call == 2.25 and set(found.models) == {"k"} and found.date == "2026-01-01"
    work, us = next(drawn(1, seed=5, noise=0))
    assert found.time([work]).expected == pytest.approx(us, rel=0.3)


def test_an_output_elsewhere_leaves_the_own_file(timed, own_calibrations, tmp_path):
    path = tmp_path / "elsewhere.json"
    assert main(["calibrate", "--from", str(timed(sites(20))), "--output", str(path)]) == 0
    assert calibration._read(path)[0] == "cpu" and not list(own_calibrations.iterdir())


def test_a_part_keeps_the_other_kinds_of_the_file(timed, own_calibrations):
    own = own_calibrations / "own.json"
    assert main(["calibrate", "--from", str(timed(sites(20)))]) == 0
    before = json.loads(own.read_text())["models"]["k"]
    other = sites(25, kind="other", seed=3)
    assert main(["calibrate", "--from", str(timed(other)), "--family", "permute"]) == 0
    models = json.loads(own.read_text())["models"]
    assert models["k"] == before and models["other"]["count"] == 25
    assert main(["calibrate", "--from", str(timed(other))]) == 0
    assert set(json.loads(own.read_text())["models"]) == {"other"}


def test_what_is_written_is_read(timed, own_calibrations):
    assert main(["calibrate", "--from", str(timed(sites(20)))]) == 0
    _, found = calibration._read(own_calibrations / "own.json")
    assert set(found.models) == {"k"} and found.sites == 20
    assert found.models["k"].time(sites(1)[0].kernels[0][0]).expected > 0  # by its trees


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', "not JSON", None])
def test_a_file_of_another_kind_is_one_line(tmp_path, capsys, content):
    path = tmp_path / "s.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["calibrate", "--from", str(path)]) == 2
    assert_one_line(capsys, f"--from takes a file that --sites wrote, got {str(path)!r}")


@pytest.mark.parametrize("line", ["[]", '{"family": "f"}', '{"kernels": 3}', '{"kernels": [[3]]}', "{"])
def test_a_damaged_line_too(timed, capsys, line):
    path = timed(sites(3))
    path.write_text(path.read_text() + line + "\n")
    assert main(["calibrate", "--from", str(path)]) == 2
    assert_one_line(capsys, "--from takes a file that --sites wrote")


def test_an_unknown_family_is_named_with_those_that_there_are(capsys):
    assert main(["calibrate", "--family", "permut"]) == 2
    assert_one_line(capsys, "--family takes attention, causal_conv1d", "got permut")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_timed(capsys):
    assert main(["calibrate", "--device", "cuda"]) == 2
    assert_one_line(capsys, "--device takes cpu here")


def test_a_folder_that_is_not_there_is_said_before_anything_is_timed(tmp_path, capsys):
    assert main(["calibrate", "--output", str(tmp_path / "none" / "c.json")]) == 2
    assert_one_line(capsys, "--output")


@pytest.mark.parametrize("module", ["numpy", "scipy.optimize", "sklearn.ensemble"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["calibrate"]) == 1
    assert_one_line(capsys, f"needs {module.partition('.')[0]}", "pip install 'fusebackend[calibrate]'")


def test_too_few_sites_are_said(timed, capsys, own_calibrations):
    assert main(["calibrate", "--from", str(timed(sites(LEAST_SITES - 1)))]) == 1
    assert_one_line(capsys, f"too few sites were timed to fit anything ({LEAST_SITES - 1})", "--minutes")
    assert not list(own_calibrations.iterdir())


def assert_one_line(capsys, *parts):
    captured = capsys.readouterr()
    (line,) = (captured.out + captured.err).strip().splitlines()
    assert all(part in line for part in parts), line


# ---- what a calibration would decide ----

KNOWN = Calibration("a device", torch.__version__, "2026-01-01", 9, {"k": TimeModel(0.0, {"us": 1.0}, 1.0, noise=0.01)}, {})


def both(site, estimated, actual, family="f", kind="k", is_called=False):
    """A site: the times of ours and of Inductor's as estimated, and as they were."""
    ways = zip(("ours", "inductor"), estimated, actual)
    return [Measured(family, site, way, [[Work(kind, {"us": guess})]], us, is_called) for way, guess, us in ways]


def test_what_would_be_applied():
    measured = [*both("faster", (5, 10), (6, 10)), *both("slower", (10, 5), (10, 5)), *both("close", (10, 10.01), (9, 10))]
    measured += both("unknown", (5, 10), (5, 10), kind="another") + both("one way", (5, 10), (5, 10))[:1]
    found = calibrate.judged(measured, KNOWN)
    assert {s.site: (s.applied, s.chosen) for s in found["f"]} == {
        "faster": (True, 6),
        "slower": (False, 5),
        "close": (None, 10),
        "unknown": (None, 10),
    }


def test_the_judgement_counts_what_is_lost():
    # Applied: one gains 4 of 10, one loses 2 of 10, and one gains nothing, though it would have gained 5.
    measured = [*both("good", (5, 10), (6, 10)), *both("bad", (5, 10), (12, 10)), *both("missed", (10, 5), (5, 10))]
    header, row = calibrate.judgement(measured, KNOWN).splitlines()
    names = ["family", "sites", "applied", "regret", "of", "the", "gain", "<", "0.95", "<", "0.98", "worst"]
    assert header.split() == [*names, "by", "default:", "regret"]
    regret, gain = (6 + 12 + 10) / (6 + 10 + 5), (30 - 28) / (30 - 21)
    assert row.split() == ["f", "3", "2", f"{regret:.3f}", f"{100 * gain:.0f}", "%", "1", "1", "0.83", "2", f"{regret:.3f}"]


def test_what_the_default_gate_times_where_the_estimate_does_not_tell():
    """Library calls both ways; where Inductor generates code, ours, beside the estimate of Inductor's."""
    close, called = {"estimated": (10, 10.05)}, {"estimated": (10, 10.01), "is_called": True}
    measured = [*both("faster", actual=(5, 10), **called), *both("hardly faster", actual=(9.9, 10), **called)]
    measured += [*both("generated", actual=(5, 10), **close), *both("generated, as fast", actual=(10, 11), **close)]
    measured += both("known", (10, 5), (5, 10), is_called=True) + both("told by nothing", (10, 9.95), (5, 10))
    found = {s.site: (s.chosen, s.chosen_by_default) for s in calibrate.judged(measured, KNOWN)["f"]}
    assert found == {
        "faster": (10, 5),
        "hardly faster": (10, 10),
        "generated": (10, 5),
        "generated, as fast": (11, 11),
        "known": (10, 10),
        "told by nothing": (10, 10),
    }
    _, row = calibrate.judgement(measured, KNOWN).splitlines()
    assert row.split()[-2:] == ["2", f"{51 / 39.9:.3f}"]


def test_a_kind_that_was_not_calibrated_is_judged_by_the_more_general_one(tmp_path):
    """As the estimates are: also in sites that were written to a file."""
    measured = both("a", (5, 10), (5, 10))
    inductor = measured[1]
    own = Work("k of f", inductor.kernels[0][0].quantities, otherwise=inductor.kernels[0][0])
    measured[1] = dataclasses.replace(inductor, kernels=[[own]])
    calibrate.write_sites(tmp_path / "sites", PROVENANCE, measured)
    _, read = calibrate.read_sites([tmp_path / "sites"])
    assert read == measured
    assert [s.applied for s in calibrate.judged(read, KNOWN)["f"]] == [True]


def test_each_family_is_judged_and_the_host_is_none():
    host = both("a call", (5, 10), (5, 10), family=calibration_sites.HOST)
    measured = [*both("a", (5, 10), (5, 10)), *both("a", (10, 5), (10, 5), family="g"), *host]
    _, first, second = calibrate.judgement(measured, KNOWN).splitlines()
    assert first.split()[:4] == ["f", "1", "1", "1.000"] and second.split()[:4] == ["g", "1", "0", "1.000"]


def test_a_check_prints_a_table_and_writes_nothing(timed, own_calibrations, capsys):
    measured = both("a", (1, 2), (10, 20))
    assert main(["calibrate", "--check", "--from", str(timed(measured))]) == 1
    assert_one_line(capsys, "there is no calibration for this device to check")
    known = {**PROVENANCE, "sites": 1, "call": 0.0, "models": {"k": vars(KNOWN.models["k"])}}
    (own_calibrations / "own.json").write_text(json.dumps(known))
    calibration.forget()
    assert main(["calibrate", "--check", "--from", str(timed(measured))]) == 0
    printed = capsys.readouterr().out
    assert "1 sites" in printed and printed.splitlines()[-1].split()[:4] == ["f", "1", "1", "1.000"]
    assert [p.name for p in own_calibrations.iterdir()] == ["own.json"]


# ---- sites ----


def test_workers_share_the_draws():
    """Together they time what one worker alone would."""
    device, families = torch.device("cpu"), ["permute", calibration_sites.STREAM]

    def first(count, index, workers):
        cases = calibration_sites._cases(families, 3, index, workers, device)
        return [(family, case.name) for family, case, *_ in (next(cases) for _ in range(count))]

    alone = first(12, 0, 1)
    assert sorted(first(6, 0, 2) + first(6, 1, 2)) == sorted(alone) and len(set(alone)) > 10


def test_products_are_drawn_of_all_forms_and_described():
    """Inductor compiles them as part of nothing else: a sample of the library's time by itself."""
    from fusebackend.bench import random_products

    device = torch.device("cpu")
    drawn = random_products.random_cases(random.Random(0), 1.0)
    works = []
    for case, dynamic in zip((next(drawn) for _ in range(60)), itertools.cycle((False, True))):
        work = random_products.work(case, dynamic, device)
        left, right = case.inputs(torch.device("meta"))
        batch = left.shape[0] if left.dim() == 3 else 1
        assert work.kind == "cublas 16 bits" and work.shape["dynamic"] == dynamic
        assert work.quantities["flops"] == 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]
        assert case.fn(left, right).shape[-2:] == (left.shape[-2], right.shape[-1])
        works.append(work)
    for name in ("batched", "a by columns", "b by columns"):
        assert {work.shape[name] for work in works} == {0.0, 1.0}


def test_products_are_timed_for_attention():
    """No other family is estimated by them, and a CPU's are not."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert calibration_sites.PRODUCT in calibration_sites._drawn(["attention", "permute"], cuda)
    assert calibration_sites.PRODUCT not in calibration_sites._drawn(["permute"], cuda)
    assert calibration_sites.PRODUCT not in calibration_sites._drawn(["attention"], cpu)


@pytest.mark.codegen
def test_a_site_in_which_another_family_alone_finds_something_is_none(library):
    """What that one describes would have to account for the time of all that the site does."""
    device = torch.device("cpu")
    cases = calibration_sites._cases(["permute"], 1, 0, 1, device)
    with calibration_sites._compiling(device):
        found, case = next(
            (p, case) for _, case, *_ in cases if (p := calibration_sites._prepare("permute", case, False, device)) is not None
        )
        assert found.kernels["ours"]
        assert calibration_sites._prepare("index_add", case, False, device) is None


@pytest.mark.codegen
def test_attention_of_dynamic_sizes_is_drawn(library):
    device = torch.device("cpu")
    (_, case, *_) = next(calibration_sites._cases(["sdpa"], 1, 0, 1, device))
    with calibration_sites._compiling(device):
        prepared = calibration_sites._prepare("sdpa", case, True, device)
    assert {way.kind for ways in prepared.kernels["ours"] for way in ways} >= {"sdpa cpu"}
    assert all(way.shape["dynamic"] for ways in prepared.kernels["ours"] for way in ways if way.kind == "sdpa cpu")


@pytest.mark.codegen
@pytest.mark.parametrize("family", ["index_add", calibration_sites.STREAM, calibration_sites.STRIDED_COPY])
def test_a_site_is_compiled_and_timed(library, family):
    device = torch.device("cpu")
    cases = calibration_sites._cases([family], 1, 0, 1, device)
    with calibration_sites._compiling(device):
        prepared = next(p for _, case, *_ in cases if (p := calibration_sites._prepare(family, case, False, device)) is not None)
    from fusebackend.bench.kernel_time import KernelTimer

    found = {m.way: m for m in calibration_sites._timed(prepared, KernelTimer(device), device)}
    assert set(found) == ({"ours", "inductor"} if family == "index_add" else {"inductor"})
    for measured in found.values():
        assert 0 < measured.us < 1e6 and measured.kernels and measured.family == family
        assert all(way.kind.endswith(" cpu") for ways in measured.kernels for way in ways)
    if family == calibration_sites.STREAM:
        (((work,),),) = (m.kernels for m in found.values())
        assert work.quantities["bytes"] > 0 and 1 <= work.shape["log2 itemsize"] <= log2(8)
