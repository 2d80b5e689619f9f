"""``bench compile``: how processes are compared. No figure is judged here."""

import json
import subprocess

from fusebackend.__main__ import main
from fusebackend.bench import compile_time


def test_compiles_are_compared_in_pairs_cold_and_warm(monkeypatch, capsys, tmp_path):
    seconds = {"inductor": [10.0, 1.0, 1.0], "fuse": [11.0, 1.0, 1.0]}
    monkeypatch.setattr(
        compile_time,
        "_cold_and_warm",
        lambda graph, way: [{"s": s, "ours": 0.1, "substitutions": 2, "from_cache": s == 1.0} for s in seconds[way]],
    )
    file = tmp_path / "compile.json"
    assert main(["bench", "compile", "--graph", "byte_lm", "--repeats", "2", "--output", str(file)]) == 0
    cold, warm = json.loads(file.read_text())["compile"]
    assert (cold["cache"], cold["ratio"], warm["cache"], warm["ratio"]) == ("cold", 1.1, "warm", 1.0)
    assert main(["bench", "table", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "| byte_lm training | cold | 10.00 s | 11.00 s | 1.10× |" in printed and "compiled again" not in printed


def test_a_warm_compile_that_missed_the_cache_is_told(monkeypatch, capsys):
    found = [{"s": s, "ours": 0.1, "substitutions": 2, "from_cache": False} for s in (10.0, 9.0, 9.0)]
    asked = []
    monkeypatch.setattr(compile_time, "_cold_and_warm", lambda graph, way: asked.append(graph) or found)
    assert main(["bench", "compile", "--model", "gpt2_small", "--kind", "inference-bf16", "--repeats", "1"]) == 0
    assert set(asked) == {"gpt2_small inference-bf16"}
    cold, warm = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpt2_small inference-bf16")]
    assert "compiled again" in warm and "compiled again" not in cold


def test_a_failing_compile_is_reported(monkeypatch, capsys):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback ...\nRuntimeError: no compiler\n")

    monkeypatch.setattr(compile_time.subprocess, "run", fails)
    assert main(["bench", "compile", "--graph", "byte_lm", "--repeats", "1"]) == 1
    assert "byte_lm training cold" in (said := capsys.readouterr().out) and "RuntimeError: no compiler" in said
