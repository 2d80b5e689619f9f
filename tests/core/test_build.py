"""The native library: found, built once, refused when unsafe, and never a reason for a compile to fail."""

import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fusebackend.native import architectures, build, cache, cuda_wheels, flags, loader, manifest, toolchain
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


def test_every_source_is_compiled_once_and_bindings_together():
    plan = build.Plan(toolchain.Toolchain.find(), (), build.sources_root())
    objects = [*plan.objects().values()]
    together = [s for sources in plan.generated().values() for s in sources]
    assert sorted([*together, *(s for s in objects if s.is_absolute())]) == plan.sources()
    assert len(together) > 10 and not any(s.stem.startswith("bind") for s in objects if s.is_absolute())
    assert {str(s) for s in objects if not s.is_absolute()} == plan.generated().keys()


def test_nvcc_begins_first_since_it_takes_longest():
    """ninja begins in the order of its file."""
    tools = toolchain.Toolchain("g++", "nvcc", Path("/"))
    by_nvcc = [s.suffix == ".cu" for s in build.Plan(tools, ("90a",), build.sources_root()).objects().values()]
    assert by_nvcc == sorted(by_nvcc, reverse=True) and 0 < sum(by_nvcc) < len(by_nvcc)


def test_builds_of_different_sources_do_not_wait_for_one_another(tmp_path, cache_dir):
    """As of a user's kernel and of the library."""
    one, other = fake_sources(tmp_path / "one"), fake_sources(tmp_path / "other", "int other() { return 1; }")
    build.build(one)
    with contextlib.ExitStack() as held:
        for lock in cache_dir.glob("build*.lock"):
            held.enter_context(cache.lock(lock.stem))
        build.build(other, progress=lambda line: None if line.startswith("[") else pytest.fail(line))


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


READS_A_NUMBER = """
#include <locale>
#include <sstream>
extern "C" __attribute__((visibility("default"))) double read_number(const char* text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  double number = 0;
  in >> number;
  return number;
}
"""


def test_a_c_plus_plus_runtime_that_is_linked_statically_stays_private(tmp_path, cache_dir, monkeypatch):
    """Found on a machine whose compiler has no other: beside torch's runtime the library's read no numbers, or crashed."""
    static = subprocess.run(["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(static).is_absolute():
        pytest.skip("there is no libstdc++.a")
    monkeypatch.setenv("CXX", "g++ -static-libstdc++")
    library = ctypes.CDLL(str(build.build(fake_sources(tmp_path, READS_A_NUMBER)) / manifest.LIBRARY))
    library.read_number.restype = ctypes.c_double
    assert library.read_number(b"1.5") == 1.5


def test_two_processes_build_once(tmp_path, cache_dir):
    fake_sources(tmp_path)
    program = (
        "import sys, pathlib; from fusebackend.native import architectures, build, toolchain; steps = []\n"
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


def test_what_is_missing_is_not_remembered(tmp_path, cache_dir, monkeypatch):
    """Who then does what the message says, installs ninja, has a library."""
    plan = fake_sources(tmp_path)
    monkeypatch.setattr(build, "plan", lambda: plan)
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [])
    monkeypatch.setattr(loader, "_load", lambda found: loader.Native(path=found.path))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ninja", None)
        assert "pip install ninja" in loader._find_and_load().reason
    assert loader._find_and_load().reason is None


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


@pytest.mark.parametrize(
    ("built_for", "driver", "said"),
    [
        ("13.0", "13.0", "-m pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*'"),
        ("13.2", "13.0", "-m pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.2.*'"),
        ("12.8", "13.1", "-m pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*'"),
        ("12.8", "12.9", "install the CUDA toolkit 12.8 from NVIDIA"),
        (None, None, "install the CUDA toolkit, or set CUDA_HOME"),
    ],
)
def test_the_command_that_gets_nvcc_is_that_of_torch_and_driver(built_for, driver, said, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(cuda_wheels, "driver_version", lambda: driver)
    assert said in cuda_wheels.how_to_get_nvcc() and "CUDA_HOME" in cuda_wheels.how_to_get_nvcc()


def test_a_gpu_without_nvcc_gives_one_warning_with_the_command(monkeypatch, cache_dir, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain.Toolchain, "find", classmethod(lambda cls: cls("/usr/bin/g++", None)))
    monkeypatch.setattr(build, "device_architectures", lambda: ("90a",))
    monkeypatch.setattr(loader, "device_architectures", lambda: ("90a",))
    monkeypatch.setattr(build, "build", lambda *a, **k: cache_dir)
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [])
    monkeypatch.setattr(manifest, "opened", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(loader, "_load", lambda found: loader.Native(cache_dir))
    monkeypatch.setattr(loader, "_loaded", None)
    assert "no CUDA kernels" in loader.load().reason
    loader.load()
    (record,) = caplog.records
    assert "pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*'" in record.getMessage()


def test_the_extra_of_pyproject_has_what_the_command_installs():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'cuda13 = ["cuda-toolkit[{",".join(cuda_wheels.PARTS)}]>=13,<14"]' in project


def test_nvcc_of_pip_is_found_after_all_others(tmp_path, monkeypatch):
    home = tmp_path / "nvidia" / "cu13"
    (home / "include").mkdir(parents=True)
    (home / "include/cuda_runtime_api.h").write_text("")
    for nvcc in (home / "bin/nvcc", tmp_path / "other/bin/nvcc"):
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
    (tmp_path / "other/include").mkdir()
    (tmp_path / "other/include/cuda_runtime_api.h").write_text("")
    monkeypatch.setattr(cuda_wheels, "homes", lambda: [home])
    for name in ("CUDACXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert toolchain.Toolchain.find().nvcc == str(tmp_path / "other/bin/nvcc")
    monkeypatch.delenv("CUDA_HOME")
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *a: None if "/usr/local/cuda" in name else real(name, *a))
    found = toolchain.Toolchain.find()
    assert (found.nvcc, found.cuda_home) == (str(home / "bin/nvcc"), home)
    assert f"-L{home / 'lib'}" not in flags.link_flags(True, found)
    (home / "lib").mkdir()
    assert f"-L{home / 'lib'}" in flags.link_flags(True, found)


def test_the_packages_of_pip_are_looked_for_in_every_part_of_the_namespace(tmp_path, monkeypatch):
    for name in ("one/nvidia/cu13/bin", "two/nvidia/cu12/bin", "two/nvidia/cu14"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("one/nvidia/cu13/bin/nvcc", "two/nvidia/cu12/bin/nvcc"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "two")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert cuda_wheels.homes() == [tmp_path / "two/nvidia/cu12", tmp_path / "one/nvidia/cu13"]
    monkeypatch.setattr(sys, "path", [])
    assert cuda_wheels.homes() == []


HALVES = """
#include "common/cpu_target.h"
using namespace fusebackend;
extern "C" void widen(const unsigned short* from, float* to, long n) { for (long i = 0; i < n; ++i) to[i] = half_to_float(from[i]); }
extern "C" void narrow(const float* from, unsigned short* to, long n) { for (long i = 0; i < n; ++i) to[i] = float_to_half(from[i]); }
"""


@pytest.mark.parametrize("target", ["-mno-avx", "-march=native"])
def test_half_floats_are_converted_alike_with_and_without_instructions_for_it(target, tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86-64")
    (tmp_path / "halves.cpp").write_text(HALVES)
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", target, f"-I{build.sources_root()}", "-o", tmp_path / "halves.so"]
    subprocess.run([*command, tmp_path / "halves.cpp"], check=True)
    library = ctypes.CDLL(str(tmp_path / "halves.so"))
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    wide = torch.empty(1 << 16)
    library.widen(ctypes.c_void_p(bits.data_ptr()), ctypes.c_void_p(wide.data_ptr()), ctypes.c_long(1 << 16))
    torch.testing.assert_close(wide, bits.view(torch.half).float(), rtol=0, atol=0, equal_nan=True)
    # All halves, the middles between them and their neighbours, and anything.
    middle = (wide + wide.roll(-1)) / 2
    near = [torch.nextafter(m, torch.full_like(m, to)) for m in (wide, middle) for to in (-torch.inf, torch.inf)]
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    floats = torch.cat([wide, middle, *near, anything])
    narrow = torch.empty(len(floats), dtype=torch.half)
    library.narrow(ctypes.c_void_p(floats.data_ptr()), ctypes.c_void_p(narrow.data_ptr()), ctypes.c_long(len(floats)))
    torch.testing.assert_close(narrow, floats.half(), rtol=0, atol=0, equal_nan=True)


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
    ("machine", "cpu", "march", "runs"),
    [
        ("x86_64", {"avx2", "fma", "bmi2", "f16c"}, "x86-64-v3", True),
        ("x86_64", {"avx2", "fma", "bmi2", "f16c"}, "x86-64", True),
        ("x86_64", {"sse2"}, "x86-64-v3", False),
        ("x86_64", {"sse2"}, "x86-64", True),
        ("x86_64", {"sse2"}, "armv8-a", False),
        ("aarch64", set(), "armv8-a", True),
        ("aarch64", set(), "x86-64", False),
        ("riscv64", set(), "", True),
        ("riscv64", set(), "x86-64", False),
    ],
)
def test_a_library_runs_on_the_cpus_that_it_was_compiled_for(machine, cpu, march, runs, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(architectures, "cpu_flags", lambda: frozenset(cpu))
    assert architectures.runs_here(march) is runs
    assert architectures.runs_here(architectures.cpu_baseline())


@pytest.mark.parametrize(
    ("built", "capability", "covered"),
    [(("90a",), "90a", True), (("80",), "90a", True), (("90a",), "80", False), (("80",), "75", False), ((), "80", False)],
)
def test_machine_code_or_older_ptx_covers_a_gpu(built, capability, covered):
    assert covers(built, capability) is covered
