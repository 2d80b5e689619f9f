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
        (["kernels", "--random", "-1"], "--random takes"),
        (["kernels", "--gate", "always"], "--gate: invalid choice"),
        (["kernels", "--family", "transpose_add", "--output", "/proc/f.json"], "--output takes"),
        (["kernels", "--family", "transpose_add", "--output", "/"], "--output takes a file"),
        (["kernels", "--family", "transpose_add", "--plots", "/dev/null"], "--plots takes a folder"),
        (["models", "--steps", "0"], "--steps takes"),
        (["models", "--model", "no_such_module:factory"], "no module 'no_such_module'"),
        (["models", "--model", "math:no_such_factory"], "math has no 'no_such_factory'"),
        (["models", "--model", ":factory"], "--model takes package.module:function"),
        (["models", "--option", "fuse.gate=always"], "fuse.gate"),
        (["models", "--option", "no.such=1"], "unknown option 'no.such'"),
        (["losses"], "--model"),
        (["losses", "--model", "gpt5"], "--model takes"),
        (["losses", "--model", "gpt2_small", "--seeds", "1"], "--seeds takes"),
        (["losses", "--model", "gpt2_small", "--rate", "nan"], "--rate takes"),
        (["losses", "--model", "gpt2_small", "--patterns", "no_such_pattern"], "no_such_pattern"),
        (["models", "--patterns", "no_such_pattern"], "no_such_pattern"),
        (["models", "--option", "fuse.strict"], "NAME=VALUE"),
        (["compile", "--graph", "resnet"], "--graph takes"),
        (["compile", "--repeats", "0"], "--repeats takes"),
        (["compile", "--model", "gpt5"], "--model takes"),
        (["compile", "--model", "gpt2_small", "--kind", "training-fp8"], "--kind takes"),
        (["compile", "--kind", "training-bf16"], "--model names one"),
        (["table", "/no/such/file.json"], "/no/such/file.json"),
        (["table"], "FILE.json"),
        (["plot", "/no/such/file.json"], "/no/such/file.json"),
        (["speed"], "invalid choice: 'speed'"),
        ([], "required: what"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line_before_any_work(arguments, said, capsys, monkeypatch):
    def begins(*_, **__):
        yield pytest.fail("work began")

    monkeypatch.setattr(process_pool, "run", begins)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("fusebackend: ") and error.count("\n") == 1
