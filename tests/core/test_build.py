"""The native library: found, built once, refused when unsafe, and never a reason for a compile to fail."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
import torch

from fusebackend.native import build, cache, loader, manifest, toolchain
from fusebackend.native.architectures import covers


def fake_sources(tmp_path, text="int answer() { return 42; }"):
    """A source tree that builds in a moment."""
    (tmp_path / "csrc" / "family").mkdir(parents=True, exist_ok=True)
    (tmp_path / "csrc" / "family" / "bind_cpu.cpp").write_text(text)
    (tmp_path / "csrc" / "header.h").write_text("int answer() { return 42; }")
    (tmp_path / "csrc" / "family" / "bind_cuda.cpp").write_text("#error only with CUDA")
    (tmp_path / "csrc" / "family" / "kernel.cu").write_text("")
    (tmp_path / "csrc" / "family" / "kernel_sm90.cu").write_text("")
    return build.Plan(toolchain.Toolchain.find(), (), tmp_path / "csrc")


def test_the_key_follows_sources_architectures_and_torch(tmp_path, monkeypatch):
    plan = fake_sources(tmp_path)
    key = plan.key
    assert fake_sources(tmp_path).key == key
    assert build.Plan(plan.toolchain, ("80",), plan.root).key != key
    assert build.Plan(toolchain.Toolchain(f"{plan.toolchain.cxx} -O0", None), (), plan.root).key != key
    assert fake_sources(tmp_path, "int answer() { return 43; }").key != key
    fake_sources(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert plan.key != key


def test_cuda_sources_are_compiled_only_where_they_can_be(tmp_path):
    plan = fake_sources(tmp_path)

    def names(*architectures):
        return {p.name for p in build.Plan(plan.toolchain, architectures, plan.root).sources()}

    assert names() == {"bind_cpu.cpp"}
    assert names("80") == {"bind_cpu.cpp", "bind_cuda.cpp", "kernel.cu"}
    assert names("80", "90a") == {"bind_cpu.cpp", "bind_cuda.cpp", "kernel.cu", "kernel_sm90.cu"}


def test_a_build_is_private_and_found_again(tmp_path, cache_dir):
    plan, steps = fake_sources(tmp_path), []
    folder = build.build(plan, progress=steps.append)
    assert steps and steps[-1].startswith("[2/2]")
    assert json.loads((folder / manifest.MANIFEST).read_text())["key"] == plan.key
    assert cache_dir.stat().st_mode & 0o777 == 0o700
    assert build.build(plan, progress=lambda line: pytest.fail("built again")) == folder


NAMES = ["two  spaces", "a$dollar", "it's", 'say "so"', "x;touch P;", "$(touch P)", "`touch P`", "|touch P &", "c:d", "ümläut", "-O", "#"]


@pytest.mark.parametrize("name", NAMES)
def test_any_path_is_quoted(tmp_path, monkeypatch, name):
    """Sources, headers, cache and current folder; and no word of a name is run."""
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / name / "cache"))
    plan = fake_sources(tmp_path / name, '#include "header.h"')
    (tmp_path / name / "csrc" / f"{name}.cpp").write_text("int other() { return 1; }")
    monkeypatch.chdir(tmp_path / name)
    assert manifest.read(build.build(plan))
    assert not list(tmp_path.rglob("P"))


def test_sources_whose_names_differ_in_special_characters_have_objects_of_their_own(tmp_path, cache_dir):
    plan = fake_sources(tmp_path)
    for i, name in enumerate(("a$b.cpp", "a$c.cpp", "a b.cpp", "a;b.cpp")):
        (plan.root / name).write_text(f"int numbered_{i}() {{ return {i}; }}")
    assert len(plan.objects()) == 5 and manifest.read(build.build(plan))


@pytest.mark.parametrize("name", ["$(touch P)", "`touch P`", 'say "so"', "back\\slash"])
def test_what_nvcc_would_run_is_refused_before_nvcc_sees_it(tmp_path, cache_dir, monkeypatch, name):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) touch {tmp_path}/was_run;; esac\n')
    nvcc.chmod(0o755)
    tools = toolchain.Toolchain(toolchain.Toolchain.find().cxx, str(nvcc), tmp_path)
    fake_sources(tmp_path / name)
    with pytest.raises(build.BuildError, match="nvcc would run a part of this path as a command"):
        build.build(build.Plan(tools, ("80",), tmp_path / name / "csrc"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))  # where nvcc writes its own files
    fake_sources(tmp_path / "plain")
    with pytest.raises(build.BuildError, match="nvcc would run a part of this path as a command"):
        build.build(build.Plan(tools, ("80",), tmp_path / "plain" / "csrc"))
    assert not (tmp_path / "was_run").exists()


def test_a_line_break_in_a_path_is_refused_with_its_reason(tmp_path, cache_dir, monkeypatch):
    with pytest.raises(build.BuildError, match=r"ninja takes no path with a line break: '.*two\\nlines.*'; rename"):
        build.build(fake_sources(tmp_path / "two\nlines"))
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "two\nlines" / "cache"))
    assert manifest.read(build.build(fake_sources(tmp_path)))  # ninja does not see this path


@pytest.mark.parametrize("words", ["{} -O2", "env {}", "'{}'"])
def test_the_compiler_may_have_arguments(tmp_path, cache_dir, monkeypatch, words):
    monkeypatch.setenv("CXX", words.format(toolchain.Toolchain.find().cxx))
    plan = fake_sources(tmp_path)
    assert toolchain.compiler_version(plan.toolchain.cxx).startswith(("g++", "c++", "clang"))
    assert manifest.read(build.build(plan))


def test_a_compiler_in_a_folder_with_spaces_is_found(tmp_path, cache_dir, monkeypatch):
    (tmp_path / "my tools").mkdir()
    (tmp_path / "my tools" / "g++").symlink_to(toolchain.Toolchain.find().cxx)
    monkeypatch.setenv("CXX", str(tmp_path / "my tools" / "g++"))
    assert manifest.read(build.build(fake_sources(tmp_path)))


@pytest.mark.parametrize("words", ["/no/such/compiler", "'g++", " "])
def test_a_compiler_that_is_not_there_is_not_used(monkeypatch, words):
    monkeypatch.setenv("CXX", words)
    assert toolchain.Toolchain.find().cxx is None


def test_two_processes_build_once(tmp_path, cache_dir):
    fake_sources(tmp_path)
    program = (
        "import sys, pathlib; from fusebackend.native import build, toolchain; steps = []\n"
        f"build.build(build.Plan(toolchain.Toolchain.find(), (), pathlib.Path({str(tmp_path / 'csrc')!r})), progress=steps.append)\n"
        "print(sum(s.startswith('[') for s in steps))"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    steps = sorted(int(p.communicate()[0]) for p in both)
    assert steps == [0, 2]


def test_a_compiler_error_is_shown_and_remembered(tmp_path, cache_dir, monkeypatch):
    plan = fake_sources(tmp_path, "this is not C++")
    monkeypatch.setattr(build, "plan", lambda: plan)
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [])
    first = loader._find_and_load()
    assert first.path is None and "compiling the kernels failed" in first.reason and "this is not C++" in first.reason
    again = loader._find_and_load()
    assert "an earlier build failed" in again.reason and "python -m fusebackend build" in again.reason


def test_no_compiler_is_a_reason_not_an_error(cache_dir, monkeypatch):
    monkeypatch.setattr(toolchain.Toolchain, "find", classmethod(lambda cls: cls(None, None)))
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [])
    assert "no C++ compiler found: install g++" in loader._find_and_load().reason
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.plan(["80"])


@pytest.mark.parametrize("architecture", ["hopper", "9.0", "", "1000"])
def test_a_malformed_architecture_is_named(architecture):
    with pytest.raises(build.BuildError, match=f"architecture '{architecture}'.*90a,80,75"):
        build.plan([architecture])


def test_architectures_without_nvcc_say_how_to_get_it(monkeypatch):
    monkeypatch.setattr(toolchain.Toolchain, "find", classmethod(lambda cls: cls("/usr/bin/g++", None)))
    with pytest.raises(build.BuildError, match="no nvcc found.*CUDA_HOME"):
        build.plan(["80"])


def test_a_directory_that_others_can_write_is_refused(cache_dir):
    cache_dir.mkdir(mode=0o700)
    cache_dir.chmod(0o777)
    with pytest.raises(cache.CacheError, match="writable by others.*chmod go-w"):
        cache.directory()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_directory_is_refused(cache_dir):
    cache_dir.mkdir(mode=0o700)
    os.chown(cache_dir, 12345, -1)
    with pytest.raises(cache.CacheError, match="belongs to user id"):
        cache.directory()


def test_a_directory_that_cannot_be_made_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(cache.CacheError, match="set FUSEBACKEND_CACHE_DIR"):
        cache.directory()


def test_a_library_built_ahead_from_other_sources_is_not_used(tmp_path, monkeypatch):
    (tmp_path / manifest.MANIFEST).write_text(json.dumps({"key": "k", "content": "other", "march": "", "architectures": []}))
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [tmp_path])
    assert loader._prebuilt() is None


def test_a_broken_manifest_is_a_reason_not_an_error(tmp_path, monkeypatch):
    (tmp_path / manifest.MANIFEST).write_text("{")
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [tmp_path])
    assert loader._prebuilt() is None


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [(("90a",), "90a", True), (("80",), "90a", True), (("90a",), "80", False), (("80",), "75", False), ((), "80", False)],
)
def test_machine_code_or_older_ptx_covers_a_gpu(architectures, capability, covered):
    assert covers(architectures, capability) is covered
