"""``bench table``: the tables of a run, several files as one run, and what changed since another run."""

import math

import pytest
from bench_examples import a_run, written

from fusebackend.__main__ import main
from fusebackend.bench import comparison, stats


def test_only_what_changed_by_more_than_three_percent_is_listed(tmp_path, capsys):
    old, new = written(tmp_path / "old.json", a_run(2.0)), a_run(2.05, torch="2.12")
    new["models"][0]["ratio"] = 1.8
    assert main(["bench", "table", written(tmp_path / "new.json", new), "--compare", old]) == 0
    said = capsys.readouterr().out
    assert "gpt2_small training-fp32: inductor / fuse 2.000 -> 1.800 (-10.0 %)" in said
    assert "tiny c" not in said and "not the same torch: 2.11 before, 2.12 now" in said and "3 ratios compared" in said


def test_rows_of_one_run_only_are_listed(tmp_path):
    old, new = a_run(), a_run()
    old["models"][0]["model"] = "gpt1"
    assert {"gpt1 training-fp32: not measured now", "gpt2_small training-fp32: new"} <= set(comparison.changes(new, old).splitlines())


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text('{"some": "thing"}')
    assert main(["bench", "table", str(path)]) == 2
    assert "no result of `python -m fusebackend bench`" in capsys.readouterr().err


def test_several_files_are_one_run_if_they_are_of_one_device_and_commit(tmp_path, capsys):
    parts = [{k: a_run()[k] for k in ("environment", section)} for section in ("kernels", "models")]
    files = [written(tmp_path / f"{i}.json", part) for i, part in enumerate(parts)]
    assert main(["bench", "table", *files]) == 0
    table = capsys.readouterr().out
    assert table.count("a device") == 1 and "`tiny`" in table and "gpt2_small" in table
    other = written(tmp_path / "other.json", a_run(device="another"))
    assert main(["bench", "table", files[0], other]) == 2
    assert "more than one device: a device and another" in capsys.readouterr().err


def test_the_models_table_has_a_column_a_kind_and_geometric_means(tmp_path, capsys):
    data = a_run(2.0)
    data["models"] += [
        {**data["models"][0], "model": "swin_b", "ratio": 8.0},
        {"model": "x", "kind": "training-fp32", "failure": "no timm"},
    ]
    assert main(["bench", "table", written(tmp_path / "run.json", data)]) == 0
    table = capsys.readouterr().out
    assert "| gpt2_small | 20.0 → 10.0 ms, **2.00×** (≥ 1.5) | fp32_matmul 9 |" in table
    assert "| geometric mean | **4.00×** |" in table and "| x |" not in table


def test_the_uncertainty_of_a_ratio_falls_with_the_root_of_the_rounds():
    few, many = [1.0, 1.1, 1.2] * 3, [1.0, 1.1, 1.2] * 12
    assert stats.relative_uncertainty(many, [1.0] * 36) == pytest.approx(stats.relative_uncertainty(few, [1.0] * 9) / 2)
    assert stats.relative_uncertainty([1.0, 2.0], [1.0, 1.0]) == math.inf


def test_the_geometric_mean_of_nothing_is_nan():
    assert stats.geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and math.isnan(stats.geometric_mean([]))
