"""Compiler and linker arguments, each list one word an argument: whoever makes a shell command of them quotes them."""

from __future__ import annotations

import itertools
import os
import shlex
import sysconfig
from pathlib import Path

import torch

from fusebackend.native.architectures import cpu_baseline
from fusebackend.native.toolchain import Toolchain, compiler_flags, compiler_version

# Symbols of the stable ABI that are newer than this can't be used. It is what makes one library good for torch 2.11 and later.
_TORCH_TARGET = "0x020b000000000000ULL"

# What a library asks the loader for, so that it finds torch's symbols.
_TORCH_LIBRARIES = ("torch", "torch_cpu")


def is_for_cuda(source: Path) -> bool:
    """Whether a source needs the CUDA toolkit: ``*.cu`` and ``*_cuda.cpp``."""
    return source.suffix == ".cu" or (source.suffix == ".cpp" and source.stem.endswith("_cuda"))


def is_for_sm90a(source: Path) -> bool:
    """Whether a CUDA source is compiled for sm_90a only: ``*_sm90.cu``."""
    return source.stem.endswith("_sm90")


def is_for_python(source: Path) -> bool:
    """Whether a source calls Python: ``*_python.cpp``."""
    return source.suffix == ".cpp" and source.stem.endswith("_python")


def python_headers(toolchain: Toolchain) -> Path | None:
    """Python's headers, for the limited API; None where they are not installed, or are of another kind of host, or of a Python without a
    GIL, which has no limited API yet."""
    folder = Path(sysconfig.get_path("include"))
    usable = not toolchain.crosses and not sysconfig.get_config_var("Py_GIL_DISABLED")
    return folder if usable and os.access(folder / "Python.h", os.R_OK) else None


def include_flags(source: Path, roots: list[Path], toolchain: Toolchain) -> list[str]:
    toolkit = toolchain.cuda_home
    system = [Path(torch.__file__).parent / "include"]
    if is_for_cuda(source) and toolkit and (source.suffix == ".cpp" or toolchain.crosses):  # else nvcc finds its own
        system.append(toolkit / "include")
    if is_for_python(source) and (headers := python_headers(toolchain)):
        system.append(headers)
    return [*(f"-I{root}" for root in roots), *(word for folder in system for word in ("-isystem", str(folder)))]


def compile_flags(source: Path, architectures: tuple[str, ...], toolchain: Toolchain) -> list[str]:
    """Everything but include paths."""
    common = [f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}", "-DUSE_CUDA"]
    if is_for_cuda(source) and "90a" in architectures:
        common.append("-DFUSE_HAS_SM90A")
    if is_for_python(source) and python_headers(toolchain):
        common.append("-DFUSE_HAS_PYTHON")
    if source.suffix != ".cu":
        march = cpu_baseline(toolchain.machine)
        return [
            *("-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -Wno-psabi".split()),
            *([f"-march={march}"] if march else []),
            *common,
        ]
    wanted = ("90a",) if is_for_sm90a(source) else architectures
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
    if toolchain.nvcc and compiler_version(toolchain.nvcc).partition("release ")[2] >= "13":
        codes.append("--compress-mode=size")  # 3.3 times smaller; older compilers don't know it
    portable = [a for a in wanted if a.isdigit()]
    if portable:  # PTX, so that the library also runs on GPUs that are newer than all of these
        newest = max(portable, key=int)
        codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    host = [f"-ccbin={host_compiler(toolchain)}"] if toolchain.crosses else []
    return [*host, "-std=c++17", "-O1", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden", *common, *codes]


def host_compiler(toolchain: Toolchain) -> str:
    """The C++ compiler's program alone, as nvcc takes it: without ``ccache`` before it and without options."""
    words = shlex.split(toolchain.cxx or "")
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))[-1]


def cuda_library_folders(toolchain: Toolchain) -> list[Path]:
    """Where the toolkit may have the CUDA runtime for the host that is compiled for."""
    toolkit = toolchain.cuda_home
    if toolkit is None:
        return []
    target = toolkit / f"targets/{'sbsa' if toolchain.machine == 'aarch64' else toolchain.machine}-linux/lib"
    folders = [target] if toolchain.crosses else [toolkit / "lib64", target, toolkit / "lib"]  # the last is that of the packages of pip
    return [folder for folder in folders if folder.is_dir()]


def has_cuda_runtime(toolchain: Toolchain) -> bool:
    """Whether there is a folder that may have the CUDA runtime to link, in the toolkit or given to the compiler (``-L``)."""
    return bool(cuda_library_folders(toolchain)) or any(flag.startswith("-L") for flag in compiler_flags(toolchain.cxx or ""))


def stand_ins(toolchain: Toolchain) -> list[str]:
    """Empty libraries, in the folder in which ninja runs, that are linked in place of torch's where those here are of another kind of host.
    Linking needs no more of them than their names: torch's symbols are looked up when a library is loaded."""
    return [f"torch_{toolchain.machine}/lib{name}.so" for name in _TORCH_LIBRARIES] if toolchain.crosses else []


def link_flags(cuda: bool, toolchain: Toolchain) -> list[str]:
    folder = next((Path(library).parent for library in stand_ins(toolchain)), Path(torch.__file__).parent / "lib")
    # A C++ runtime that is linked statically, by a compiler that finds no other, stays private. Where its symbols are seen, the loader
    # takes some of them and some of torch's, and a stream reads no number or calls what is no function.
    private = "-Wl,--exclude-libs,ALL"
    flags = ["-shared", "-Wl,-s", private, f"-L{folder}", "-Wl,--no-as-needed", *(f"-l{name}" for name in _TORCH_LIBRARIES)]
    if cuda:
        libraries = cuda_library_folders(toolchain)
        flags += [*(f"-L{p}" for p in libraries), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return flags
