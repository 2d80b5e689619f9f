"""Compiler and linker arguments, each list one word an argument: whoever makes a shell command of them quotes them."""

from __future__ import annotations

from pathlib import Path

import torch

from fusebackend.native.architectures import cpu_baseline
from fusebackend.native.toolchain import Toolchain, compiler_version

# Symbols of the stable ABI that are newer than this can't be used. It is what makes one library good for torch 2.11 and later.
_TORCH_TARGET = "0x020b000000000000ULL"


def is_for_cuda(source: Path) -> bool:
    """Whether a source needs the CUDA toolkit: ``*.cu`` and ``*_cuda.cpp``."""
    return source.suffix == ".cu" or (source.suffix == ".cpp" and source.stem.endswith("_cuda"))


def is_for_sm90a(source: Path) -> bool:
    """Whether a CUDA source is compiled for sm_90a only: ``*_sm90.cu``."""
    return source.stem.endswith("_sm90")


def include_flags(source: Path, roots: list[Path], toolchain: Toolchain) -> list[str]:
    toolkit = toolchain.cuda_home
    system = [Path(torch.__file__).parent / "include"]
    if source.suffix == ".cpp" and is_for_cuda(source) and toolkit:  # nvcc finds its own
        system.append(toolkit / "include")
    return [*(f"-I{root}" for root in roots), *(word for folder in system for word in ("-isystem", str(folder)))]


def compile_flags(source: Path, architectures: tuple[str, ...], toolchain: Toolchain) -> list[str]:
    """Everything but include paths."""
    common = [f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}", "-DUSE_CUDA"]
    if is_for_cuda(source) and "90a" in architectures:
        common.append("-DFUSE_HAS_SM90A")
    if source.suffix != ".cu":
        march = cpu_baseline()
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
    return ["-std=c++17", "-O1", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden", *common, *codes]


def link_flags(cuda: bool, toolchain: Toolchain) -> list[str]:
    flags = ["-shared", "-Wl,-s", f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    toolkit = toolchain.cuda_home
    if cuda and toolkit:
        names = ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib")  # the last is that of the packages of pip
        libraries = [p for p in (toolkit / name for name in names) if p.is_dir()]
        flags += [*(f"-L{p}" for p in libraries), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return flags
