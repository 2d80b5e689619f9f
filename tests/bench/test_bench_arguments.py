"""``python -m fusebackend bench``: what it accepts."""

import pytest

from fusebackend.__main__ import main
from fusebackend.bench import process_pool


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["kernels", "--family", "transposed"], "--family takes"),
        (["kernels", "--ways", "eager,fast"], "--ways takes"),
        (["kernels", "--case", "no such case"], "no case has 'no such case'"),
        (["kernels", "--family", "transpose_add", "--output", "/no/such/folder/f.json"], "there is no folder"),
        (["models", "--model", "gpt5"], "--model takes"),
        (["models", "--kind", "training-fp8"], "--kind takes"),
        (["models", "--steps", "0"], "--steps takes"),
        (["models", "--patterns", "no_such_pattern"], "no_such_pattern"),
        (["models", "--option", "fuse.strict"], "NAME=VALUE"),
        (["compile", "--graph", "resnet"], "--graph takes"),
        (["compile", "--repeats", "0"], "--repeats takes"),
        (["table", "/no/such/file.json"], "/no/such/file.json"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line_before_any_work(arguments, said, capsys, monkeypatch):
    def begins(*_, **__):
        yield pytest.fail("work began")

    monkeypatch.setattr(process_pool, "run", begins)
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.startswith("fusebackend: ") and error.count("\n") == 1
