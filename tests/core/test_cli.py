"""``python -m fusebackend``"""

import fcntl
import functools
import importlib.metadata
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import fusebackend
from fusebackend import Pattern
from fusebackend.__main__ import main
from fusebackend.native import toolchain


def test_env_says_what_is_there(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for word in ("fusebackend", "torch", "C++ compiler", "nvcc", "cache", "library", "transpose_add", "fuse.strict"):
        assert word in printed


def test_patterns_says_why_each_pays(capsys):
    assert main(["patterns"]) == 0
    assert "transpose_add (post_grad, at aten.add.Tensor" in capsys.readouterr().out


MODULE = """
import os, sys
import torch

def model(): return torch.sin, (torch.ones(3),)
def wrong_inputs(): return torch.sin, (torch.ones(3), 1, 2)
def nothing(): return None
def raises(): raise ValueError("no weights in\\nthis folder")
def exits(): sys.exit(0)
def fails(): return False
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Modules of a user, in the current folder."""
    (tmp_path / "users_module.py").write_text(MODULE)
    (tmp_path / "users_broken_module.py").write_text("import users_missing_module")
    (tmp_path / "users_script.py").write_text("raise SystemExit(0)")
    (tmp_path / "users_typo.py").write_text("def f(:")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("users_")]:
        del sys.modules[name]


#: Command lines, the exit status, and what the only line on stderr must have in it.
WRONG = [
    ("", 2, "required: command"),
    ("speed", 2, "invalid choice: 'speed'"),
    ("env --all", 2, "--all"),
    ("demo --steps 0", 2, "--steps takes a whole number from 1 on, got '0'"),
    ("demo --steps -3", 2, "--steps takes a whole number from 1 on, got '-3'"),
    ("demo --steps many", 2, "--steps takes a whole number from 1 on, got 'many'"),
    ("fuzz --device cudaa", 2, "--device: invalid choice: 'cudaa'"),
    ("fuzz --minutes -1", 2, "--minutes takes a number above 0, got '-1'"),
    ("fuzz --minutes 0", 2, "--minutes takes"),
    ("fuzz --minutes nan", 2, "--minutes takes"),
    ("fuzz --programs -1", 2, "--programs takes a whole number from 1 on, got '-1'"),
    ("fuzz --programs 0", 2, "--programs takes"),
    ("fuzz --seed -1", 2, "--seed takes"),
    ("fuzz --device imagined --codegen-every 5", 2, "codegen_every takes 0 with device='imagined'"),
    ("fuzz --codegen-every -1", 2, "--codegen-every takes"),
    ("fuzz --programs 1 --output file", 2, "--output takes a folder, got 'file'"),
    ("fuzz --programs 1 --output /proc/failures", 2, "--output takes a folder that can be written"),
    ("verify unknown", 2, "no pattern is called 'unknown'. Known: "),
    ("verify transpose_add unknown", 2, "no pattern is called 'unknown'"),
    ("verify --import nosuchmod", 2, "--import: no module 'nosuchmod'"),
    ("verify --import .nosuchmod", 2, "--import takes the name of a module"),
    ("verify --import users_script", 1, "importing users_script raised SystemExit"),
    ("verify --import users_typo", 1, "importing users_typo raised SyntaxError"),
    (
        "verify --import users_broken_module",
        1,
        "importing users_broken_module raised ModuleNotFoundError: No module named 'users_missing_m",
    ),
    ("build --arch rubbish", 2, "--arch takes 'none', or compute capabilities without the dot, e.g. 90a,80,75; got 'rubbish'"),
    ("build --arch 80,,90a", 2, "got ''"),
    ("build --arch=", 2, "got ''"),
    ("build --arch none --output file", 2, "--output takes a folder, got 'file'"),
    ("build --arch none --output file/below", 2, "--output takes a folder"),
    ("build --arch none --output /proc/library", 2, "--output takes a folder that can be written"),
    ("build --wheel --arch none --output file", 2, "--output takes a folder, got 'file'"),
    ("explain", 2, "required: factory"),
    ("explain users_module", 2, "explain takes package.module:function, got 'users_module'"),
    ("explain nosuchmod:model", 2, "no module 'nosuchmod'"),
    ("explain users_module:nothing_there", 2, "users_module has no 'nothing_there'"),
    ("explain users_module:number", 2, "must be a function, got int"),
    ("explain users_module:nothing", 2, "must return (model_or_function, args)"),
    ("explain users_module:raises", 1, "users_module:raises() raised ValueError: no weights in (/"),
    ("explain users_module:exits", 1, "users_module:exits() raised SystemExit"),
    ("explain users_module:wrong_inputs", 1, "what users_module:wrong_inputs() made raised"),
    ("explain users_module:model --html page.txt", 2, "FILE.html"),
    ("explain users_module:model --pattern unknown", 2, "no pattern is called 'unknown'"),
    ("explain users_module:model --html nowhere/page.html", 2, "there is no folder"),
    ("bisect users_module", 2, "bisect takes package.module:function"),
    ("bisect nosuchmod:check", 2, "no module 'nosuchmod'"),
    ("gate", 2, "required: what"),
    ("gate forget", 2, "invalid choice: 'forget'"),
    ("bench", 2, "required: what"),
    ("bench kernels --family nonsense", 2, "--family takes"),
    ("bench models --model nonsense", 2, "--model takes"),
    ("bench models --model users_typo:model", 1, "importing users_typo raised SyntaxError"),
    ("bench compile --repeats 0", 2, "--repeats takes a whole number from 1 on, got '0'"),
]


def test_explain_knows_the_patterns_that_the_factorys_module_registers(module, capsys):
    (module / "users_pattern.py").write_text(
        "import torch, fusebackend\nx = torch.randn(3)\n"
        "fusebackend.register_replacement(lambda x: torch.sin(x) * 2, lambda x: torch.sin(x) + torch.sin(x), (x,), name='users_sine')\n"
        "def model(): return lambda x: torch.sin(x) * 2, (x,)\n"
    )
    try:
        assert main("explain users_pattern:model --pattern users_sine".split()) == 0
        assert "users_sine: 1 substitutions" in capsys.readouterr().out
    finally:
        fusebackend.unregister("users_sine")


@pytest.mark.parametrize(("line", "status", "said"), WRONG, ids=[line or "nothing" for line, _, _ in WRONG])
def test_a_command_line_that_is_wrong_is_one_line_before_any_work(line, status, said, module, monkeypatch, capsys):
    for work in ("build.build", "wheel.pack"):
        monkeypatch.setattr(f"fusebackend.native.{work}", lambda *_, **__: pytest.fail("work began"))
    assert main(line.split()) == status
    printed = capsys.readouterr()
    assert printed.err.startswith("fusebackend: ") and printed.err.count("\n") == 1 and said in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--help", 0),
        ("fuzz --help", 0),
        ("explain users_module:model", 0),
        ("verify transpose_add", 0),
        ("verify test_untested", 1),  # there was nothing to compare
        ("bisect users_module:fails", 1),
        ("gate list", 0),
        ("fuzz --programs 1 --minutes 0.0000001", 1),  # nothing was compared
    ],
)
def test_the_exit_status(line, status, module, temporary_pattern, cache_dir, monkeypatch):
    class Untested(Pattern):
        name = "test_untested"
        anchors = (torch.ops.aten.sin.default,)

        def match(self, node):
            return None

    temporary_pattern(Untested())
    try:
        found = main(line.split())
    except SystemExit as end:
        found = end.code
    assert found == status


def test_a_cache_that_cannot_be_used_is_one_line(cache_dir, capsys):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    assert main(["gate", "list"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fusebackend: cache directory") and "chmod go-w" in error and error.count("\n") == 1


def test_a_reader_that_stops_reading_is_no_error(tmp_path):
    done = subprocess.run(
        ["bash", "-c", '"$0" -m fusebackend patterns | true; echo ${PIPESTATUS[0]}', sys.executable], capture_output=True, text=True
    )
    assert done.stderr == "" and done.stdout in ("0\n", "1\n")


@pytest.mark.parametrize("arguments", [["fuzz", "--minutes", "5"], ["demo"], ["verify"]])
def test_ctrl_c_is_one_line(arguments, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for work in ("tools.fuzz.fuzz", "tools.demo.run", "tools.verify.print_verifications"):
        monkeypatch.setattr(f"fusebackend.{work}", interrupted)
    assert main(arguments) == 130
    assert capsys.readouterr().err == "fusebackend: interrupted\n"


def is_running(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def test_ctrl_c_ends_a_build_and_its_compilers(tmp_path, monkeypatch):
    """The signal goes to one process alone, as `kill -INT` sends it; a terminal sends it to ninja too."""
    compiler = tmp_path / "slow-g++"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *" -c "*) echo $$ >> {tmp_path}/compilers; echo $PPID >> {tmp_path}/ninja; sleep 600;; esac\n'
        f'exec {toolchain.Toolchain.find().cxx} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "fusebackend", "build", "--arch", "none", "--output", str(tmp_path / "library")]
    # What a shell starts in the background, perhaps these tests, ignores the signal, and so do its children.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "ninja").exists():
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and error.splitlines()[-1] == "fusebackend: interrupted" and "Traceback" not in error
    started = {*(tmp_path / "compilers").read_text().split(), *(tmp_path / "ninja").read_text().split()}
    while any(is_running(int(pid)) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list((tmp_path / "library").glob("*")) and not list((tmp_path / "cache").rglob("*.failed"))
    (held,) = (tmp_path / "cache").glob("build-*.lock")
    with open(held) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_console_script_is_the_same_command(monkeypatch):
    (script,) = (e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "fusebackend")
    assert script.load() is main


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
