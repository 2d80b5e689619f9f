"""A library and a wheel for another kind of host than this one: what ``CXX`` compiles for decides."""

import platform
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from fusebackend.native import architectures, build, flags, loader, manifest, wheel
from fusebackend.native.toolchain import Toolchain

OTHER = "x86_64" if platform.machine() == "aarch64" else "aarch64"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
CROSS = f"{OTHER.replace('_', '-')}-linux-gnu-g++"
needs_cross_compiler = pytest.mark.skipif(not shutil.which(CROSS), reason=f"needs {CROSS} (Debian: apt-get install g++-{CROSS[:-4]})")


@pytest.fixture
def cross(tmp_path, monkeypatch):
    """A compiler that says that it makes code for another kind of host, and compiles nothing; and an nvcc with its toolkit."""
    for name, text in (
        ("tools/cross-g++", f"case $* in *-dumpmachine) echo {OTHER}-linux-gnu ;; esac"),
        ("cuda/bin/nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88"),
        ("cuda/include/cuda_runtime_api.h", ""),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "tools/cross-g++"))
    monkeypatch.setenv("CUDACXX", str(tmp_path / "cuda/bin/nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return Toolchain.find()


def sources(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }')
    return folder


def test_the_compiler_says_for_which_kind_of_host(cross):
    assert (cross.machine, cross.crosses) == (OTHER, True)
    here = Toolchain("g++", None)
    assert (here.machine, here.crosses) == (platform.machine(), False)
    assert not Toolchain("/bin/false", None).crosses and not Toolchain(None, None).crosses


@pytest.mark.parametrize(("machine", "baseline"), [("aarch64", "armv8-a"), ("x86_64", "x86-64-v3"), ("riscv64", "")])
def test_the_baseline_is_that_of_the_host_compiled_for(machine, baseline, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    assert architectures.cpu_baseline(machine) == baseline and architectures.cpu_baseline() == ""


def test_nothing_of_this_hosts_libraries_is_linked(cross, tmp_path):
    text = build.Plan(cross, (), sources(tmp_path)).ninja_file()
    assert f"-march={architectures.cpu_baseline(OTHER)}" in text and "torch/lib " not in text
    assert f"-Ltorch_{OTHER}" in text and f"build torch_{OTHER}/libtorch_cpu.so: link" in text
    assert f"build {OTHER}_cpu/answer.cpp.o" in text, "objects of this host stay as they are"
    here = build.Plan(Toolchain("g++", None), (), tmp_path / "csrc").ninja_file()
    assert "torch/lib " in here and f"-Ltorch_{OTHER}" not in here


def test_nvcc_is_given_the_compiler_of_the_other_host(cross, tmp_path):
    words = flags.compile_flags(Path("a.cu"), ("80",), Toolchain(f"env {cross.cxx} -LFOLDER", cross.nvcc, cross.cuda_home))
    assert f"-ccbin={cross.cxx}" in words
    assert str(tmp_path / "cuda/include") in flags.include_flags(Path("a.cu"), [], cross)
    assert not any("-ccbin" in word for word in flags.compile_flags(Path("a.cu"), ("80",), Toolchain("g++", cross.nvcc)))


def test_a_missing_cuda_runtime_says_how_to_get_it(cross, monkeypatch):
    with pytest.raises(build.BuildError) as error:
        build.plan(("80",))
    assert f"no CUDA runtime for {OTHER} in {cross.cuda_home}" in str(error.value)
    assert f"--platform manylinux_2_17_{OTHER} --target FOLDER 'nvidia-cuda-runtime==13.0.*', then CXX='{cross.cxx} -L" in str(error.value)
    monkeypatch.setenv("CXX", f"{cross.cxx} -L/somewhere")
    assert build.plan(("80",)).architectures == ("80",)


def test_a_library_for_another_host_is_not_built_into_this_hosts_cache(cross, cache_dir, monkeypatch):
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [])
    monkeypatch.setattr(loader, "_loaded", None)
    found = loader.load()
    assert found.path is None and f"{cross.cxx} compiles for {OTHER}, and this host is {platform.machine()}: unset CXX" in found.reason


@needs_cross_compiler
def test_a_library_is_cross_compiled(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setenv("CXX", CROSS)
    folder = build.build(build.Plan(Toolchain.find(), (), sources(tmp_path)), tmp_path / "out")
    library = (folder / manifest.LIBRARY).read_bytes()
    assert struct.unpack_from("<H", library, 18) == (ELF_MACHINES[OTHER],)
    assert b"libtorch.so\0" in library and b"libtorch_cpu.so\0" in library
    assert manifest.read(folder)["march"] == architectures.cpu_baseline(OTHER)


@needs_cross_compiler
def test_the_wheel_is_tagged_with_the_host_it_is_for(tmp_path, cache_dir, monkeypatch):
    pytest.importorskip("auditwheel")
    monkeypatch.setenv("CXX", CROSS)
    small = build.Plan(Toolchain.find(), (), sources(tmp_path))
    made = wheel.pack(small, tmp_path / "dist")
    assert made.name.endswith(f"_{OTHER}.whl") and "-py3-none-manylinux" in made.name
    with zipfile.ZipFile(made) as archive:
        library = archive.read(f"fusebackend/lib/{manifest.LIBRARY}")
    assert struct.unpack_from("<H", library, 18) == (ELF_MACHINES[OTHER],)
