"""``bench compile``: how processes are compared. No figure is judged here."""

import json
import subprocess

from fusebackend.__main__ import main
from fusebackend.bench import compile_time


def test_compiles_are_compared_in_pairs_cold_and_warm(monkeypatch, capsys, tmp_path):
    seconds = {"inductor": [10.0, 1.0, 1.0], "fuse": [11.0, 1.0, 1.0]}
    monkeypatch.setattr(
        compile_time, "_cold_and_warm", lambda graph, way: [{"s": s, "ours": 0.1, "substitutions": 2} for s in seconds[way]]
    )
    file = tmp_path / "compile.json"
    assert main(["bench", "compile", "--graph", "byte_lm", "--repeats", "2", "--output", str(file)]) == 0
    cold, warm = json.loads(file.read_text())["compile"]
    assert (cold["cache"], cold["ratio"], warm["cache"], warm["ratio"]) == ("cold", 1.1, "warm", 1.0)
    assert main(["bench", "table", str(file)]) == 0
    assert "| byte_lm training | cold | 10.00 s | 11.00 s | 1.10× |" in capsys.readouterr().out


def test_a_failing_compile_is_reported(monkeypatch, capsys):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Traceback ...\nRuntimeError: no compiler\n")

    monkeypatch.setattr(compile_time.subprocess, "run", fails)
    assert main(["bench", "compile", "--graph", "byte_lm", "--repeats", "1"]) == 1
    assert "byte_lm training cold" in (said := capsys.readouterr().out) and "RuntimeError: no compiler" in said
