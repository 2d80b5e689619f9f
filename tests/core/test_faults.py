"""What goes wrong around the native library and the caches: the compile ends right, and somebody says why."""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch

import fusebackend
from fusebackend import Match, Pattern
from fusebackend.native import build, cache, loader, manifest, toolchain, user_kernels
from fusebackend.options import Options
from fusebackend.session import code_identity

KILLED = """
import json, os, signal, sys, threading
from pathlib import Path
from fusebackend.native import cache, manifest

what, folder = sys.argv[1], Path(sys.argv[2])

def entry(text):
    return {"key": text, "content": "c", "march": "", "architectures": []}

def write(text):
    if what == "library":
        manifest.write(folder, text.encode() * 1000, entry(text), private=True)
    else:
        cache.write_atomically(folder / "file", text.encode() * 100000)

def found():
    if what == "library":
        with manifest.opened(folder) as library:
            text = library.contents["key"]
            assert os.pread(library.descriptor, 10**6, 0) == text.encode() * 1000, "library and manifest do not belong together"
            return text
    data = (folder / "file").read_bytes()
    assert data in (b"old" * 100000, b"new" * 100000), "half a file"
    return data[:3].decode()

def killed_at(step):
    # Counts the lines of the write, and those in which Python's own modules deal with files.
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        count += event == "line" and any(name in frame.f_code.co_filename for name in ("fusebackend", "tempfile", "os.py"))
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    child = os.fork()
    if child == 0:
        sys.settrace(trace)
        write("new")
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

write("old")
seen, step = [], 0
while True:
    step += 1
    killed = killed_at(step)
    seen.append(found())
    if not killed:
        break
    write("old")
assert seen == sorted(seen, reverse=True) and seen[0] == "old" and seen[-1] == "new", seen
write("new")
print(step, len(list(folder.iterdir())))
"""


@pytest.mark.parametrize(("what", "files"), [("library", 2), ("file", None)])
def test_a_write_that_is_killed_at_any_line_leaves_the_old_or_the_new(tmp_path, what, files):
    done = subprocess.run([sys.executable, "-c", KILLED, what, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps, left = map(int, done.stdout.split())
    assert steps > 40 and files in (None, left)  # what killed writes have left is removed by the next


@pytest.mark.parametrize("name", [manifest.LIBRARY, manifest.MANIFEST])
@pytest.mark.parametrize("content", ["nothing", "garbage", "nested", "digits", "huge", "pipe"])
def test_what_is_damaged_foreign_or_huge_in_the_cache_is_named_once_and_built_again(plan, cache_dir, caplog, name, content):
    path = build.build(plan) / name
    path.unlink()
    texts = {"nothing": b"", "garbage": os.urandom(1000), "nested": b"[" * 100000, "digits": b'{"key": ' + b"1" * 10000 + b"}"}
    if content == "pipe":
        os.mkfifo(path)  # nobody writes to it
    else:
        path.write_bytes(texts.get(content, b""))
        path.chmod(0o600)
        if content == "huge":
            os.truncate(path, 1 << 40)
    for _ in range(2):
        assert loader._find_and_load().path == path.parent / manifest.LIBRARY
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert record.getMessage().startswith(f"fusebackend: {path} is ") and "built again" in record.getMessage()


def test_an_object_that_was_damaged_after_it_was_compiled_is_compiled_again(plan, cache_dir):
    folder = build.build(plan)
    (compiled,) = (cache_dir / "objects").rglob("*.o")
    compiled.write_bytes(b"\x7fELF")
    (compiled.parents[1] / manifest.LIBRARY).unlink()
    (folder / manifest.LIBRARY).unlink()
    assert answer(build.build(plan)) == 42


def test_a_kernels_source_that_was_damaged_in_the_cache_is_written_again(cache_dir, caplog):
    texts = {"kernel.cpp": "int kernel() { return 1; }", "helper.hpp": "#define HELP 1"}
    folder = user_kernels._collect(texts)
    (folder / "kernel.cpp").write_text("int kernel() { return 2; }")
    (folder / "helper.hpp").chmod(0o666)
    (folder / "foreign.cpp").write_text("int foreign() { return 3; }")
    assert user_kernels._collect(texts) == folder
    assert {p.name: p.read_text() for p in folder.iterdir()} == texts
    for word in ("kernel.cpp is damaged", "helper.hpp is writable by others", "foreign.cpp is not a source"):
        assert word in caplog.text


def test_kernels_that_differ_in_a_header_alone_are_told_apart(cache_dir):
    first, second = (user_kernels._collect({"k.cpp": '#include "h.hpp"', "h.hpp": f"#define N {i}"}) for i in range(2))
    tools = toolchain.Toolchain.find()
    assert build.Plan(tools, (), first).key != build.Plan(tools, (), second).key


def answer(folder):
    return ctypes.CDLL(str(folder / manifest.LIBRARY)).answer()


def spoiled(data: bytes) -> list[bytes]:
    return [b"", data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1]), b"\xff" * 100]


@pytest.mark.parametrize("file", [manifest.LIBRARY, manifest.MANIFEST])
def test_a_damaged_cache_entry_is_built_again(plan, cache_dir, file):
    path = build.build(plan) / file
    whole = path.read_bytes()
    for data in spoiled(whole):
        path.unlink()  # a library that is mapped must not change under its user
        path.write_bytes(data)
        assert answer(build.build(plan)) == 42
        assert manifest.read(path.parent)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"key": "k"}', "wrong types"])
def test_a_manifest_of_any_kind_is_no_error(plan, cache_dir, text):
    folder = build.build(plan)
    if text == "wrong types":
        text = json.dumps({**manifest.read(folder), "architectures": 90})
    (folder / manifest.MANIFEST).write_text(text)
    assert manifest.read(folder) is None
    assert loader._find_and_load().path == folder / manifest.LIBRARY


def test_a_damaged_library_that_was_built_ahead_is_not_loaded(plan, cache_dir, tmp_path, monkeypatch, caplog):
    folder = build.build(plan, tmp_path / "ahead")
    (folder / manifest.LIBRARY).write_bytes(b"\x7fELF")
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [folder])
    assert loader._find_and_load().path.is_relative_to(cache_dir)
    assert f"the library in {folder} is not used: {folder / manifest.LIBRARY} is damaged" in caplog.text


@pytest.fixture
def ordinary_user(plan, monkeypatch):
    """File permissions count: root, whom they do not stop, becomes somebody else for the test. Yields their cache directory."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are root's alone
        shutil.copytree(plan.root, f"{folder}/csrc")
        monkeypatch.setattr(build, "plan", lambda: build.Plan(plan.toolchain, (), Path(folder, "csrc")))
        monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", f"{folder}/cache")
        was = os.geteuid()
        if was == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder, "cache")
        finally:
            os.seteuid(was)
            for path in (Path(folder, "cache"), Path(folder, "cache", "native")):
                if path.exists():
                    path.chmod(0o700)


def test_a_cache_directory_that_is_read_only_is_a_reason(ordinary_user):
    ordinary_user.mkdir(mode=0o500)
    reason = loader._find_and_load().reason
    assert "Permission denied" in reason and "set FUSEBACKEND_CACHE_DIR" in reason


def test_a_directory_in_the_cache_that_is_read_only_is_a_reason(ordinary_user):
    cache.directory("native").chmod(0o500)
    assert "Permission denied" in loader._find_and_load().reason


def test_a_library_in_a_read_only_cache_is_used(ordinary_user):
    folder = build.build(build.plan())
    for path in (folder, folder.parent, ordinary_user):
        path.chmod(0o500)
    assert loader._find_and_load().path == folder / manifest.LIBRARY


def test_a_full_disk_leaves_nothing_behind(plan, cache_dir, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "No space left on device" in loader._find_and_load().reason
    assert not list((cache_dir / "native").rglob(f"{manifest.LIBRARY}*"))
    assert loader._find_and_load().path  # once there is space, without being asked


def test_a_compiler_that_cannot_write_is_a_reason(plan, cache_dir, monkeypatch):
    """As on a full disk: whatever is longer than a few bytes fails, in the compiler's processes too."""

    def limited(*args, popen=subprocess.Popen, **kwargs):
        return popen(*args, **kwargs, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", limited)
        reason = loader._find_and_load().reason
    assert "compiling the kernels failed" in reason
    assert "an earlier build failed" in loader._find_and_load().reason
    monkeypatch.setattr(loader, "FAILURES_LAST", 0)  # a day later
    assert loader._find_and_load().path


def test_a_build_that_is_killed_is_finished_by_the_next(plan, cache_dir, tmp_path):
    """The compiler outlives its parent: nobody else may write there until it is gone."""
    compiler = tmp_path / "slow-g++"
    compiler.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            case "$*" in *" -c "*)
                echo $$ >> {tmp_path}/began
                until [ -e {tmp_path}/go ]; do sleep 0.05; done
                echo $$ >> {tmp_path}/ended;;
            esac
            exec {toolchain.Toolchain.find().cxx} "$@"
            """)
    )
    compiler.chmod(0o755)
    program = (
        "import functools, pathlib; from fusebackend.native import build, toolchain\n"
        f"plan = build.Plan(toolchain.Toolchain({str(compiler)!r}, None), (), pathlib.Path({str(plan.root)!r}))\n"
        "build.build(plan, progress=functools.partial(print, flush=True))\n"
    )

    def start():
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    first = start()
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "began").exists():
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = start()
        assert second.stdout.readline() == "waits for another process that is building\n"
    finally:
        (tmp_path / "go").touch()
    assert second.wait(60) == 0
    began, ended = ((tmp_path / name).read_text().split() for name in ("began", "ended"))
    assert len(began) <= 2 and began == ended  # one after the other
    made = build.Plan(toolchain.Toolchain(str(compiler), None), (), plan.root)
    assert answer(build.build(made, progress=lambda line: pytest.fail("built again"))) == 42


TIMING = """
import pathlib, sys, time, torch, fusebackend
from fusebackend.profitability import measurement_store as verdicts, policy

def timed(self, region, subject, estimate):
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(float(sys.argv[2]))
    return verdicts.Measurement(True, 1.0, 2.0, "region")

policy.Gate._time = timed
x, y = torch.randn(64, 48), torch.randn(48, 64)
found = torch.compile(lambda x, y: x.t() + y, backend="fuse", options={"fuse.gate": "measure"})(x, y)
assert torch.equal(found, x.t() + y)
print(fusebackend.last_report().counts(), len(list(verdicts.stored())))
"""


@pytest.mark.codegen
def test_a_process_that_is_killed_while_it_times_leaves_the_next_as_it_was(tmp_path, monkeypatch):
    """Nothing of its verdict, no lock."""
    library = loader.load().path
    monkeypatch.setenv("FUSEBACKEND_LIBRARY", str(library.parent))
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    began = tmp_path / "began"
    first = subprocess.Popen([sys.executable, "-c", TIMING, began, "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not began.exists():
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    assert not list((tmp_path / "cache" / "gate").iterdir())
    second = subprocess.run([sys.executable, "-c", TIMING, began, "0"], capture_output=True, text=True, timeout=120)
    assert "{'transpose_add': 1} 1" in second.stdout, second.stderr


class Broken(Pattern):
    """Raises where it is told to."""

    name = "test_broken"
    anchors = (torch.ops.aten.sin.default,)

    def __init__(self, where):
        self.where = where

    def match(self, node):
        if self.where == "match":
            raise RuntimeError("on purpose")
        return Match((node,), self.emit)

    def emit(self, emitter):
        raise RuntimeError("on purpose")

    def fingerprint(self):
        if self.where == "fingerprint":
            raise RuntimeError("on purpose")
        return self.where


@pytest.mark.parametrize("where", ["match", "emit", "fingerprint"])
def test_a_pattern_that_raises_costs_only_its_site(interpreted, temporary_pattern, where):
    temporary_pattern(Broken(where))
    x, y = torch.randn(8, 6), torch.randn(6, 8)

    def fn(x, y):
        return torch.sin(x) @ y, x.t() + y

    torch.testing.assert_close(interpreted(fn)(x, y), fn(x, y))
    made = fusebackend.last_report()
    assert made.counts() == {"transpose_add": 1}
    (reason,) = (r.reason for r in made.rejections if r.pattern == "test_broken")
    assert "raised RuntimeError: on purpose" in reason


@pytest.mark.codegen
def test_a_compile_that_we_can_not_prepare_is_inductors(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(fusebackend.backend, "Session", broken)
    x = torch.randn(8, 6)
    torch.testing.assert_close(torch.compile(torch.sin, backend="fuse")(x), x.sin())
    said = "all is left to Inductor: preparing the compile raised RuntimeError: on purpose"
    assert fusebackend.last_report().notes == [said] and said in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="on purpose"):
        torch.compile(torch.sin, backend="fuse", options={"fuse.strict": True})(x)


def test_without_a_fingerprint_nothing_is_cached(temporary_pattern):
    temporary_pattern(Broken("fingerprint"))
    assert code_identity(Options(), loader.load()) is None
