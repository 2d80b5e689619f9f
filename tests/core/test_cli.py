"""``python -m fusebackend``"""

import pytest

import fusebackend
from fusebackend.__main__ import main


def test_env_says_what_is_there(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for word in ("fusebackend", "torch", "C++ compiler", "nvcc", "cache", "library", "transpose_add", "fuse.strict"):
        assert word in printed


def test_patterns_says_why_each_pays(capsys):
    assert main(["patterns"]) == 0
    assert "transpose_add (post_grad, at aten.add.Tensor" in capsys.readouterr().out


def test_a_wrong_architecture_is_an_error_in_a_line(capsys):
    assert main(["build", "--arch", "hopper"]) == 1
    assert "architecture 'hopper'" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"fusebackend {fusebackend.__version__}\n"


def test_help_lists_every_command_and_bench_its_own(capsys):
    for arguments, words in [(["--help"], ("env", "explain", "bench", "demo")), (["bench", "--help"], ("kernels", "models"))]:
        with pytest.raises(SystemExit):
            main(arguments)
        printed = capsys.readouterr().out
        assert all(word in printed for word in words)


@pytest.mark.codegen
def test_the_demo_trains_and_shows_its_substitutions(capsys):
    assert main(["demo", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "largest difference to eager" in printed and "transpose_add" in printed and "fuse is" in printed
