"""A small library in place of ours, and a cache of its own."""

import pytest

from fusebackend import cache_keys
from fusebackend.native import build, loader, toolchain

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
