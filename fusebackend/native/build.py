"""Compiles ``csrc/`` into one shared library with ninja.

One library serves every torch >= 2.11, with or without CUDA: bindings use only torch's stable ABI, the CUDA runtime is
linked statically, and the three symbols that a CPU build of torch lacks are weak (csrc/common/binding.h). No GPU is
needed to build. A library is named by its key, the hash of all that went into it, so a stale one is never found.
Source lines for profilers triple objects: ``NVCC_APPEND_FLAGS=-lineinfo``, which nvcc reads, adds them to a library in a
``FUSEBACKEND_CACHE_DIR`` of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import torch

from fusebackend import cache_keys
from fusebackend.native import cache

LIBRARY = "libfusebackend.so"
MANIFEST = "libfusebackend.json"

# Symbols newer than this must not be used by the bindings: it is what makes one binary good for 2.11 and later.
_TORCH_TARGET = "0x020b000000000000ULL"


class BuildError(RuntimeError):
    """The library can't be built; the message says what is missing or shows the compiler's words."""


def sources_root() -> Path:
    """The folder ``csrc``: inside the installed package, or beside it in a checkout (``pip install -e``)."""
    package = Path(__file__).parents[1]
    return next(p for p in (package / "csrc", package.parent / "csrc") if p.is_dir())


def content_hash(root: Path | None = None) -> str:
    """Hash of every source file's path and content; by default of what the library was made from, whoever compiled it."""
    return cache_keys.content_hash(root or sources_root())


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The compilers found here, None where there is none, and the CUDA toolkit's folder with headers and runtime."""

    cxx: str | None
    nvcc: str | None
    cuda_home: Path | None = None

    @classmethod
    def find(cls) -> Toolchain:
        cxx = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), *(f"{h}/bin/nvcc" for h in homes if h)]
        nvcc = next((c for c in candidates if c and shutil.which(c)), None)
        # nvcc on the PATH may be a wrapper that stands outside its toolkit.
        beside = Path(os.path.realpath(nvcc)).parents[1] if nvcc else None
        roots = [Path(h) for h in (*homes[:2], beside, homes[2]) if h]
        cuda_home = next((r for r in roots if (r / "include/cuda_runtime_api.h").exists()), None)
        return cls(cxx and shutil.which(cxx), nvcc if cuda_home else None, cuda_home)


@lru_cache
def compiler_version(compiler: str) -> str:
    """What a compiler says of its version, in a line, or why it could not be asked."""
    try:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unusable: {error}"
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "release" in line), lines[0] if lines else "says nothing")


def device_architectures() -> tuple[str, ...]:
    """The architectures of this machine's GPUs as nvcc names them, e.g. ``("90a",)``; empty where torch sees none."""
    if not torch.cuda.is_available():
        return ()
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(sorted("90a" if c == (9, 0) else f"{c[0]}{c[1]}" for c in found))


def cpu_baseline() -> str:
    """The ``-march`` that CPU kernels are compiled for. Not ``native``: one library may serve several machines."""
    if platform.machine() == "x86_64" and {"avx2", "fma", "bmi2", "f16c"} <= cpu_flags():
        return "x86-64-v3"
    return {"x86_64": "x86-64", "aarch64": "armv8-a"}.get(platform.machine(), "")


@lru_cache
def cpu_flags() -> frozenset[str]:
    """The processor's feature names from /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))


def _for_cuda(source: Path) -> bool:
    return source.suffix == ".cu" or (source.suffix == ".cpp" and source.stem.endswith("_cuda"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be compiled, with what, for what. ``key`` names the result."""

    toolchain: Toolchain
    architectures: tuple[str, ...]
    root: Path

    @property
    def cuda(self) -> bool:
        return bool(self.architectures)

    def sources(self) -> list[Path]:
        def wanted(path: Path) -> bool:
            if _for_cuda(path):
                return self.cuda and (not path.stem.endswith("_sm90") or "90a" in self.architectures)
            return path.suffix == ".cpp"

        return sorted(p for p in self.root.rglob("*") if p.is_file() and wanted(p))

    def cxx_flags(self, source: Path) -> list[str]:
        toolkit = self.toolchain.cuda_home
        march = cpu_baseline()
        return [
            *("-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas".split()),
            *([f"-march={march}"] if march else []),
            *self._common_flags(source),
            *([f"-isystem {toolkit / 'include'}"] if _for_cuda(source) and toolkit else []),
        ]

    def nvcc_flags(self, source: Path) -> list[str]:
        architectures = ["90a"] if source.stem.endswith("_sm90") else list(self.architectures)
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
        if compiler_version(self.toolchain.nvcc).partition("release ")[2] >= "13":
            codes.append("--compress-mode=size")  # 3.3 x smaller; older ones don't know the word
        portable = [a for a in architectures if a.isdigit()]
        if portable:  # PTX, so that a GPU newer than all of these still runs
            newest = max(portable, key=int)
            codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
        host = "-fPIC,-fvisibility=hidden"
        return ["-std=c++17", "-O1", "--expt-relaxed-constexpr", f"-Xcompiler={host}", *self._common_flags(source), *codes]

    def _common_flags(self, source: Path) -> list[str]:
        sm90 = ["-DFUSE_HAS_SM90A"] if _for_cuda(source) and "90a" in self.architectures else []
        torch_flags = [f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}", "-DUSE_CUDA", f"-isystem {Path(torch.__file__).parent / 'include'}"]
        return [f"-I{self.root}", f"-I{sources_root()}", *torch_flags, *sm90]

    def link_flags(self) -> list[str]:
        torch_lib = Path(torch.__file__).parent / "lib"
        flags = ["-shared", "-Wl,-s", f"-L{torch_lib}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
        toolkit = self.toolchain.cuda_home
        if self.cuda and toolkit:
            libraries = [p for p in (toolkit / "lib64", toolkit / "targets/x86_64-linux/lib", toolkit / "lib") if p.is_dir()]
            flags += [*(f"-L{p}" for p in libraries), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return flags

    @property
    def key(self) -> str:
        """Hash of sources, flags, compilers and torch's version."""
        flags = [self.cxx_flags(Path("any_cuda.cpp")), *([self.nvcc_flags(Path("any.cu"))] if self.cuda else [])]
        compilers = (self.toolchain.cxx, self.toolchain.nvcc if self.cuda else None)
        return cache_keys.native_library(content_hash(self.root), self.architectures, flags, (compiler_version(c) for c in compilers if c))

    def manifest(self) -> dict[str, object]:
        return {
            "key": self.key,
            "content": content_hash(self.root),
            "architectures": list(self.architectures),
            "march": cpu_baseline(),
            "torch": torch.__version__,
            "cxx": compiler_version(self.toolchain.cxx),
            "nvcc": compiler_version(self.toolchain.nvcc) if self.cuda else None,
        }


def plan(architectures: Iterable[str] | None = None) -> Plan:
    """Decides what to compile: for ``architectures``, or by default for the GPUs that torch sees (none: CPU only).

    Raises:
        BuildError: no C++ compiler; architectures were asked for and there is no nvcc; a malformed architecture.
    """
    toolchain = Toolchain.find()
    if toolchain.cxx is None:
        raise BuildError("no C++ compiler found: install g++ (Debian: apt-get install g++) or set CXX")
    if architectures is None:
        architectures = device_architectures() if toolchain.nvcc else ()
    else:
        architectures = tuple(architectures)
        for a in architectures:
            if not a.removesuffix("a").isdigit() or not 70 <= int(a.removesuffix("a")) <= 129:
                raise BuildError(f"architecture {a!r}: give compute capabilities without the dot, e.g. 90a,80,75")
        if architectures and toolchain.nvcc is None:
            raise BuildError("no nvcc found: install the CUDA toolkit, or set CUDA_HOME or CUDACXX")
    return Plan(toolchain, architectures, sources_root())


def build(what: Plan, output: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Compiles, or finds compiled, ``what``; returns the folder that holds the library and its manifest.

    Args:
        what: from :func:`plan`.
        output: the folder to put them in; by default the private cache, named by ``what.key``.
        progress: called with one line per finished step.

    Raises:
        BuildError: a compiler failed; the message ends with its words.
        cache.CacheError: the cache directory can't be used.
    """
    target = output or cache.directory("native", what.key)
    if output is None and read_manifest(target):
        return target
    with cache.lock("build", progress) as held:
        if output is None and read_manifest(target):  # another process built it while this one waited
            return target
        # Objects are shared between keys, so that an edit recompiles one file; ninja tracks headers by depfiles, and
        # a killed compile leaves no entry in its log, so its half-written object is made again. Those of CPU sources serve
        # libraries for any architectures.
        workspace = cache.directory("objects", cache_keys.native_objects(what.root))
        (workspace / "build.ninja").write_text(_ninja_file(what))
        _run_ninja(workspace, held, progress)
        target.mkdir(parents=True, exist_ok=True)
        library = (workspace / LIBRARY).read_bytes()
        cache.write_atomically(target / LIBRARY, library, mode=0o755 if output else 0o700)
        # Last: a library without its manifest is an unfinished build and is not looked at.
        manifest = {**what.manifest(), "sha256": hashlib.sha256(library).hexdigest()}
        cache.write_atomically(target / MANIFEST, json.dumps(manifest, indent=1).encode(), mode=0o644 if output else 0o600)
    return target


def read_manifest(folder: Path) -> dict | None:
    """What the library in ``folder`` was built from and for; None if there is none that is whole, to the last byte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        library = (folder / LIBRARY).read_bytes()
        texts = [manifest[k] for k in ("key", "content", "march")] + list(manifest["architectures"])
        intact = all(isinstance(t, str) for t in texts) and manifest.get("sha256") in (None, hashlib.sha256(library).hexdigest())
        return manifest if intact else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _ninja_file(what: Plan) -> str:
    def escape(text: object) -> str:
        return str(text).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {what.toolchain.cxx}",
        f"nvcc = {what.toolchain.nvcc}",
        "rule cxx",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule nvcc",
        "  command = $nvcc -MD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx $in -o $out {' '.join(what.link_flags())}",
    ]
    objects = []
    for source in what.sources():
        folder = "_".join(("cuda", *what.architectures)) if _for_cuda(source) else "cpu"
        name = f"{folder}/{'_'.join(source.relative_to(what.root).parts)}.o"
        objects.append(name)
        rule, flags = ("nvcc", what.nvcc_flags(source)) if source.suffix == ".cu" else ("cxx", what.cxx_flags(source))
        lines += [f"build {name}: {rule} {escape(source)}", f"  flags = {' '.join(flags)}"]
    lines += [f"build {LIBRARY}: link {' '.join(objects)}", f"default {LIBRARY}", ""]
    return "\n".join(lines)


def _ninja_command() -> list[str]:
    found = shutil.which("ninja")
    return [found] if found else [sys.executable, "-m", "ninja"]


def _run_ninja(workspace: Path, held: int, progress: Callable[[str], None] | None) -> None:
    began = time.perf_counter()
    command = [*_ninja_command(), "-C", str(workspace)]
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
            pass_fds=(held,),  # ninja outlives us if we are killed: the next builder must wait for it
        )
    except OSError as error:
        raise BuildError(f"ninja can't be run ({error}): pip install ninja") from error
    output: list[str] = []
    for line in process.stdout or ():
        output.append(line)
        if progress and line.startswith("["):
            words = line.split()
            file = next((Path(w).name for w in reversed(words) if w.endswith((".cu", ".cpp"))), LIBRARY)
            progress(f"{words[0]} {file} ({time.perf_counter() - began:.0f} s)")
    if process.wait() != 0:
        raise BuildError(f"compiling the kernels failed ({' '.join(command)}):\n{''.join(output[-40:])}")
