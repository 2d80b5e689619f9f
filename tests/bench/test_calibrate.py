"""``calibrate``: what it begins with, files are read and refused, decisions are judged."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from drawn_works import drawn, sites

from fusebackend.__main__ import main
from fusebackend.bench import calibrate, calibration_sites, fit_times
from fusebackend.bench.calibration_sites import Measured
from fusebackend.bench.fit_times import LEAST_SITES
from fusebackend.profitability import calibration
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.time_model import TimeModel
from fusebackend.rewriting.pattern import Work

for _module in ("numpy", "scipy", "sklearn"):
    pytest.importorskip(_module, reason="the extra calibrate is not installed")


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


def test_the_default_gate_calls_both_ways_unless_the_estimate_is_clear():
    """It says that ours takes 2 % less, or half."""
    close, clear = both("close", (9.8, 10), (12, 10), is_called=True), both("clear", (5, 10), (12, 10), is_called=True)
    found = {s.site: (s.chosen, s.chosen_by_default) for s in calibrate.judged([*close, *clear], KNOWN)["f"]}
    assert found == {"close": (12, 10), "clear": (12, 12)}


def test_the_default_gate_compiles_what_pays_soon():
    """Ours takes a millisecond, and Inductor's form four more, as a model estimates that knows little: in 1,000 runs 4 s. Or under two."""
    unsure = dataclasses.replace(KNOWN, models={"k": TimeModel(0.0, {"us": 1.0}, 1.0, noise=2.0)})
    measured = [*both("faster", (1e3, 5e3), (1e3, 9e3)), *both("slower", (1e3, 5e3), (1e3, 8e2)), *both("less", (1e3, 2.9e3), (1e3, 9e3))]
    found = {s.site: (s.chosen, s.chosen_by_default) for s in calibrate.judged(measured, unsure)["f"]}
    assert found == {"faster": (9e3, 1e3), "slower": (8e2, 8e2), "less": (9e3, 9e3)}


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
