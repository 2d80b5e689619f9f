"""``bench plot`` and ``--plots``."""

import json
import sys

import pytest
from bench_examples import TRANSPOSED, a_run, written

from fusebackend.__main__ import main
from fusebackend.bench import extras, plots, summary


def test_plots_show_the_sections_of_a_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = written(tmp_path / "run.json", a_run())
    assert main(["bench", "plot", file, "--plots", str(tmp_path / "plots")]) == 0
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"families.png", "models.png", "random.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "plots").iterdir())


def test_random_shapes_are_plotted_against_their_floor_alone(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = [{"family": "tiny", "case": str(t), "ms": {"floor": 1.0, "kernel": t, "fuse": 9.0}} for t in (1.0, 1.2, 1.4)]
    file = written(tmp_path / "run.json", {**a_run(), "random": rows})
    assert main(["bench", "plot", file, "--plots", str(tmp_path / "plots")]) == 0
    assert "random.png" in {p.name for p in (tmp_path / "plots").iterdir()}
    assert "tiny: 1.200 times the floor's time on average; 1 of 3 below 0.8 of its speed" in summary.summary("random", rows)


def test_without_matplotlib_the_extra_is_named_and_the_rest_still_comes(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    family(TRANSPOSED)
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--output", str(file), "--plots", str(tmp_path / "plots")]) == 0
    said = capsys.readouterr()
    assert "tiny: transposed" in said.out and json.loads(file.read_text())["kernels"]
    assert "pip install 'fusebackend[bench]'" in said.err
    with pytest.raises(extras.MissingExtra):
        plots.draw(a_run(), tmp_path)
