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
from fusebackend import Match, Pattern, cache_keys
from fusebackend.native import build, cache, loader, manifest, toolchain
from fusebackend.options import Options
from fusebackend.session import code_identity

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A library that builds in a moment, which ``native`` would take for ours."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bind_cpu.cpp").write_text(SOURCE)
    made = build.Plan(toolchain.Toolchain.find(), (), tmp_path / "csrc")
    monkeypatch.setattr(build, "plan", lambda: made)
    monkeypatch.setattr(cache_keys, "content_hash", lambda root, suffixes=(): "content")
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [])
    return made


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
    assert f"the library in {folder} is not used: it is damaged" in caplog.text


@pytest.mark.parametrize("where", ["folder", "library"])
@pytest.mark.parametrize("packaged", [False, True])
def test_what_the_world_can_write_is_never_loaded(plan, cache_dir, tmp_path, monkeypatch, caplog, where, packaged):
    folder = build.build(plan, tmp_path / "ahead")
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [folder])
    if packaged:
        monkeypatch.setattr(loader, "PACKAGED", folder)
    opened = []
    monkeypatch.setattr(torch.ops, "load_library", lambda path: opened.append(os.path.dirname(path)))
    (folder if where == "folder" else folder / manifest.LIBRARY).chmod(0o777)
    loader._find_and_load()
    assert str(folder) not in opened and "is writable by others" in caplog.text
    (folder if where == "folder" else folder / manifest.LIBRARY).chmod(0o755)
    loader._find_and_load()
    assert opened[-1] == str(folder)


def test_a_library_in_the_cache_that_the_world_can_write_is_never_loaded(plan, cache_dir):
    library = build.build(plan) / manifest.LIBRARY
    library.chmod(0o722)
    assert "is writable by others" in loader._find_and_load().reason


def test_beside_our_code_the_group_that_writes_it_may_write_the_library(tmp_path):
    code, library = tmp_path / "native.py", tmp_path / manifest.LIBRARY
    for path in (code, library):
        path.touch()
        path.chmod(0o664)
    cache.check_private(library, like=code)
    for mode in (0o644, 0o640):
        code.chmod(mode)
        with pytest.raises(cache.CacheError, match="writable by others"):
            cache.check_private(library, like=code)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_library_may_belong_to_the_owner_of_our_code_only(tmp_path):
    code, library = tmp_path / "native.py", tmp_path / manifest.LIBRARY
    for path in (code, library):
        path.touch(mode=0o644)
    os.chown(library, 12345, -1)
    with pytest.raises(cache.CacheError, match="belongs to user id 12345"):
        cache.check_private(library, like=code)
    os.chown(code, 12345, -1)
    cache.check_private(library, like=code)


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

def timed(self, region, subject):
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


def test_without_a_fingerprint_nothing_is_cached(temporary_pattern):
    temporary_pattern(Broken("fingerprint"))
    assert code_identity(Options(), loader.load()) is None
