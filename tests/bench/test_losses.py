"""``bench losses``: the experiment is the same in every arm, and its statistics are right. No figure is judged here."""

import json
import math
import os
import statistics
import subprocess

import pytest
import torch

from fusebackend.__main__ import main
from fusebackend.bench import losses

MODEL = f"{__name__}:a_language_model"


def a_language_model():
    from fusebackend.tools.byte_lm import ByteLM

    return ByteLM(32, 32, 1), (torch.randint(256, (4, 32)),)


@pytest.mark.parametrize("n, quantile", [(5, 2.776), (10, 2.262), (30, 2.045)])
def test_the_interval_is_students(n, quantile):
    ratios = [math.exp(0.1 * i) for i in range(n)]
    mean, low, high = losses.interval(ratios)
    spread = quantile * statistics.stdev(math.log(r) for r in ratios) / math.sqrt(n)
    assert mean == pytest.approx(math.exp(0.05 * (n - 1)))
    assert math.log(high / mean) == pytest.approx(spread, rel=0.01) and math.log(mean / low) == pytest.approx(spread, rel=0.01)


def test_distances_are_means_over_the_steps():
    found = {
        "float64": {"losses": [[3.0, 2.0], [3.0, 2.0]]},
        "without": {"losses": [[3.0, 2.2], [3.1, 2.1]]},
        "with": {"losses": [[3.1, 2.1], [3.0, 1.8]], "substitutions": {"fp32_matmul": 2}},
    }
    row = losses.figures(losses.Setting("m", seeds=2, steps=2), found)
    assert [d["without"] for d in row["distances"]] == pytest.approx([0.1, 0.1])
    assert row["ratio"] == pytest.approx(1.0) and row["low"] <= 1 <= row["high"] and row["losses"] == (3.0, 2.0)


def test_every_arm_begins_at_the_same_numbers_and_every_seed_at_others(library):
    setting = losses.Setting(MODEL, seeds=2, steps=3, batch=2)
    exact, without, ours = (losses.train(setting, arm) for arm in losses.ARMS)
    for other in (without, ours):
        torch.testing.assert_close(torch.tensor(other["losses"]), torch.tensor(exact["losses"]), rtol=1e-5, atol=0)
    first, second = exact["losses"]
    assert first != second and first[0] > first[-1]
    assert ours["substitutions"] and not without["substitutions"]


def test_a_row_is_printed_and_kept(monkeypatch, capsys, tmp_path, library):
    def here(setting, arm, folder):
        os.makedirs(folder, exist_ok=True)
        return losses.train(setting, arm, folder)

    monkeypatch.setattr(losses, "_process", here)
    file = tmp_path / "losses.json"
    assert main(["bench", "losses", "--model", MODEL, "--seeds", "2", "--steps", "2", "--batch", "2", "--output", str(file)]) == 0
    assert "2 seeds, 2 steps" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["losses"]
    assert row["low"] <= row["ratio"] <= row["high"] and 0 < row["gradients"][0]["with"] < 1e-5
    assert main(["bench", "table", str(file)]) == 0
    assert "2 × 2" in capsys.readouterr().out


def test_an_arm_that_fails_is_told(monkeypatch, capsys):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback ...\nRuntimeError: no such thing\n")

    monkeypatch.setattr(losses.subprocess, "run", fails)
    assert main(["bench", "losses", "--model", "byte_lm", "--seeds", "2"]) == 1
    assert "RuntimeError: no such thing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--model", "gpt5"], ["--model", "byte_lm", "--seeds", "1"], ["--model", "byte_lm", "--patterns", "x"]]
)
def test_what_it_does_not_take_is_told(arguments, capsys):
    assert main(["bench", "losses", *arguments]) == 1
    assert capsys.readouterr().err.startswith("fusebackend:")
