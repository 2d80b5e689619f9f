"""``bench losses``: all runs of the experiment are alike, and its statistics are right. No figure is judged here."""

import json
import math
import os
import statistics
import subprocess
import sys

import pytest
import torch

from fusebackend.__main__ import main
from fusebackend.bench import loss_distance, stats

MODEL = f"{__name__}:a_language_model"


def a_language_model():
    from fusebackend.tools.byte_lm import ByteLM

    return ByteLM(32, 32, 1), (torch.randint(256, (4, 32)),)


pytest.importorskip("scipy", reason="the test extra is not installed")


@pytest.mark.parametrize("n, quantile", [(2, 12.7062), (5, 2.77645), (10, 2.26216), (30, 2.04523)])
def test_the_interval_is_students(n, quantile):
    ratios = [math.exp(0.1 * i) for i in range(n)]
    mean, low, high = stats.geometric_mean_interval(ratios)
    spread = quantile * statistics.stdev(math.log(r) for r in ratios) / math.sqrt(n)
    assert mean == pytest.approx(math.exp(0.05 * (n - 1)))
    assert math.log(high / mean) == pytest.approx(spread, rel=1e-5) and math.log(mean / low) == pytest.approx(spread, rel=1e-5)


def test_distances_are_means_over_the_steps():
    found = {
        "float64": {"losses": [[3.0, 2.0], [3.0, 2.0]]},
        "without": {"losses": [[3.0, 2.2], [3.1, 2.1]]},
        "with": {"losses": [[3.1, 2.1], [3.0, 1.8]], "substitutions": {"fp32_matmul": 2}},
    }
    row = loss_distance.figures(loss_distance.Setting("m", seeds=2, steps=2), found)
    assert [d["without"] for d in row["distances"]] == pytest.approx([0.1, 0.1])
    assert row["ratio"] == pytest.approx(1.0) and row["low"] <= 1 <= row["high"] and row["losses"] == (3.0, 2.0)


def test_all_runs_of_a_seed_start_from_the_same_numbers_and_other_seeds_from_others(library):
    setting = loss_distance.Setting(MODEL, seeds=2, steps=3, batch=2)
    exact, without, ours = (loss_distance.train(setting, run) for run in loss_distance.RUNS)
    for other in (without, ours):
        torch.testing.assert_close(torch.tensor(other["losses"]), torch.tensor(exact["losses"]), rtol=1e-5, atol=0)
    first, second = exact["losses"]
    assert first != second and first[0] > first[-1]
    assert ours["substitutions"] and not without["substitutions"]


def test_a_row_is_printed_and_kept(monkeypatch, capsys, tmp_path, library):
    def here(setting, run, folder):
        os.makedirs(folder, exist_ok=True)
        return loss_distance.train(setting, run, folder)

    monkeypatch.setattr(loss_distance, "_process", here)
    file = tmp_path / "losses.json"
    assert main(["bench", "losses", "--model", MODEL, "--seeds", "2", "--steps", "2", "--batch", "2", "--output", str(file)]) == 0
    assert "2 seeds, 2 steps" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["losses"]
    assert row["low"] <= row["ratio"] <= row["high"] and 0 < row["gradients"][0]["with"] < 1e-5
    assert main(["bench", "table", str(file)]) == 0
    assert "2 × 2" in capsys.readouterr().out


def test_a_failing_training_process_is_reported(monkeypatch, capsys):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback ...\nRuntimeError: no such thing\n")

    monkeypatch.setattr(loss_distance.subprocess, "run", fails)
    assert main(["bench", "losses", "--model", "byte_lm", "--seeds", "2"]) == 1
    assert "RuntimeError: no such thing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--model", "gpt5"], ["--model", "byte_lm", "--seeds", "1"], ["--model", "byte_lm", "--patterns", "x"]]
)
def test_wrong_arguments_are_reported(arguments, capsys):
    assert main(["bench", "losses", *arguments]) == 2
    assert capsys.readouterr().err.startswith("fusebackend:")


@pytest.mark.parametrize("installed", [False, True])
def test_without_scipy_the_extra_is_named_before_any_work(installed, monkeypatch, capsys):
    began = []
    if not installed:
        monkeypatch.setitem(sys.modules, "scipy", None)
        monkeypatch.setitem(sys.modules, "scipy.stats", None)
    monkeypatch.setattr(loss_distance, "run", lambda settings: began.append(settings) or iter(()))
    assert main(["bench", "losses", "--model", "byte_lm"]) == (0 if installed else 1)
    assert bool(began) == installed and ("pip install 'fusebackend[bench]'" in capsys.readouterr().err) != installed
