"""Compiles ``csrc/`` into one shared library; README.md says how one library serves every torch.

No GPU is needed to build. A library is named by its key, the hash of everything that went into it, so a stale one is never found.
``NVCC_APPEND_FLAGS=-lineinfo``, which nvcc reads, adds source lines for profilers, which triple the size of objects; use a
``FUSEBACKEND_CACHE_DIR`` of its own for such a library, since the key does not depend on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from fusebackend import cache_keys
from fusebackend.native import cache, cuda_wheels, manifest
from fusebackend.native.architectures import cpu_baseline, device_architectures, is_architecture
from fusebackend.native.flags import compile_flags, has_cuda_runtime, include_flags, is_for_cuda, is_for_sm90a, link_flags, stand_ins
from fusebackend.native.ninja_build import BuildError, CompilerError, ninja_file, run_ninja
from fusebackend.native.toolchain import Toolchain, compiler_flags, compiler_version


def sources_root() -> Path:
    """The folder ``csrc``: inside the installed package, or beside it in a checkout (``pip install -e``)."""
    package = Path(__file__).parents[1]
    return next(p for p in (package / "csrc", package.parent / "csrc") if p.is_dir())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled (``root``), with what, for which GPU architectures. ``key`` names the result."""

    toolchain: Toolchain
    architectures: tuple[str, ...]
    root: Path

    @property
    def cuda(self) -> bool:
        return bool(self.architectures)

    def sources(self) -> list[Path]:
        def wanted(path: Path) -> bool:
            if is_for_cuda(path):
                return self.cuda and (not is_for_sm90a(path) or "90a" in self.architectures)
            return path.suffix == ".cpp"

        return sorted(p for p in self.root.rglob("*") if p.is_file() and wanted(p))

    @property
    def key(self) -> str:
        """Hash of sources, flags, compilers and torch's version."""
        kinds = ("any_python.cpp", "any_cuda.cpp", "any.cu") if self.cuda else ("any_python.cpp", "any_cuda.cpp")
        flags = [compile_flags(Path(kind), self.architectures, self.toolchain) for kind in kinds]
        flags.append(link_flags(self.cuda, self.toolchain))
        compilers = [c for c in (self.toolchain.cxx, self.toolchain.nvcc if self.cuda else None) if c]
        sources = cache_keys.content_hash(self.root)
        if self.root != sources_root():  # a user's kernel, which includes our headers
            sources += cache_keys.content_hash(sources_root(), cache_keys.NATIVE_HEADERS)
        named = [f"{compiler_version(c)}{' '.join(compiler_flags(c))}" for c in compilers]
        return cache_keys.native_library(sources, self.architectures, flags, named)

    def manifest(self) -> dict[str, object]:
        cxx, nvcc = self.toolchain.cxx, self.toolchain.nvcc if self.cuda else None
        return {
            "key": self.key,
            "content": cache_keys.content_hash(self.root),
            "architectures": list(self.architectures),
            "march": cpu_baseline(self.toolchain.machine),
            "torch": torch.__version__,
            "cxx": compiler_version(cxx) if cxx else None,
            "nvcc": compiler_version(nvcc) if nvcc else None,
        }

    def objects(self) -> dict[str, Path]:
        """The object files, as paths in the folder in which ninja runs, and their sources."""

        machine = f"{self.toolchain.machine}_" if self.toolchain.crosses else ""

        def name(source: Path) -> str:
            # Objects of CPU sources serve libraries for any architectures.
            folder = machine + ("_".join(("cuda", *self.architectures)) if is_for_cuda(source) else "cpu")
            parts = source.relative_to(self.root).parts
            plain = re.sub(r"[^\w.+-]", "_", "_".join(parts), flags=re.ASCII)
            unlike = "" if plain == "_".join(parts) else f".{hashlib.sha256(os.fsencode(source.name)).hexdigest()[:8]}"
            return f"{folder}/{plain}{unlike}.o"

        together = {source for sources in self.generated().values() for source in sources}
        generated = {f"{machine}cpu/{file}.o": Path(file) for file in self.generated()}
        named = {name(source): source for source in self.sources() if source not in together}
        # ninja begins in this order. What takes longest is first, so that no core waits for one long compile at the end.
        by_nvcc = {object_file: source for object_file, source in named.items() if source.suffix == ".cu"}
        return {**by_nvcc, **generated, **named}

    def generated(self) -> dict[str, list[Path]]:
        """Files that include several sources each, in the folder in which ninja runs: the CPU bindings of this package. Nearly all of the
        time that a binding takes is that of torch's headers."""
        if self.root != sources_root():
            return {}
        bindings = [s for s in self.sources() if s.stem.startswith("bind") and s.suffix == ".cpp" and not is_for_cuda(s)]
        return {f"bindings_{i}.cpp": bindings[i::2] for i in range(2)}

    def ninja_file(self) -> str:
        roots = list(dict.fromkeys((self.root, sources_root())))
        objects = [
            (name, source, compile_flags(source, self.architectures, self.toolchain) + include_flags(source, roots, self.toolchain))
            for name, source in self.objects().items()
        ]
        return ninja_file(self.toolchain, objects, manifest.LIBRARY, link_flags(self.cuda, self.toolchain), stand_ins(self.toolchain))


def plan(architectures: Iterable[str] | None = None) -> Plan:
    """Decides what to compile: for ``architectures``, or by default for the GPUs that torch sees (none: CPU only).

    Raises:
        BuildError: no C++ compiler; architectures were asked for and there is no nvcc, or no CUDA runtime for the host that ``CXX``
            compiles for; a malformed architecture.
    """
    toolchain = Toolchain.find()
    if toolchain.cxx is None:
        raise BuildError("no C++ compiler found: install g++ (Debian: apt-get install g++) or set CXX")
    if architectures is None:
        architectures = device_architectures() if toolchain.nvcc else ()
    else:
        architectures = tuple(architectures)
        wrong = next((a for a in architectures if not is_architecture(a)), None)
        if wrong is not None:
            raise BuildError(f"architecture {wrong!r}: give compute capabilities without the dot, e.g. 90a,80,75")
        if architectures and toolchain.nvcc is None:
            raise BuildError(f"no nvcc found: {cuda_wheels.how_to_get_nvcc()}")
        if architectures and toolchain.crosses and not has_cuda_runtime(toolchain):
            how = cuda_wheels.how_to_get_runtime(toolchain.machine, toolchain.cxx, compiler_version(toolchain.nvcc or ""))
            raise BuildError(f"no CUDA runtime for {toolchain.machine} in {toolchain.cuda_home}: {how}")
    return Plan(toolchain, architectures, sources_root())


def build(what: Plan, output: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Compiles ``what``, unless that was done before; returns the folder that holds the library and its manifest.

    Args:
        what: from :func:`plan`.
        output: the folder to put them in; by default one in the private cache, named by ``what.key``.
        progress: called with one line per finished step.

    Raises:
        BuildError: a compiler failed, and the message ends with its output; or it compiles for another kind of host, and no ``output``
            was given.
        cache.CacheError: the cache directory can't be used.
    """
    tools = what.toolchain
    if output is None and tools.crosses:  # the cache is this host's
        raise BuildError(f"{tools.cxx} compiles for {tools.machine}, and this host is {platform.machine()}: unset CXX")
    target = output or cache.directory("native", what.key)
    if output is None and manifest.read(target):
        return target
    # Keys share one folder of objects, so that an edit recompiles one file. ninja follows headers by depfiles. A compile that was
    # killed leaves no entry in ninja's log, so its half-written object is made again.
    objects = cache_keys.native_objects(what.root)
    with cache.lock(f"build-{objects}", progress) as held:  # a user's kernel does not wait for the library, nor the other way round
        if output is None and manifest.read(target):  # another process built it while this one waited
            return target
        workspace = cache.directory("objects", objects)
        for attempt in ("with the objects that are there", "with new ones"):
            had_objects = any(workspace.glob("*/*.o"))
            cache.write_atomically(workspace / "build.ninja", what.ninja_file().encode())
            for file, sources in what.generated().items():
                text = "".join(f'#include "{s.relative_to(what.root).as_posix()}"\n' for s in sources).encode()
                if not (workspace / file).is_file() or (workspace / file).read_bytes() != text:
                    cache.write_atomically(workspace / file, text)
            try:
                run_ninja(workspace, held, progress)
                break
            except CompilerError:
                # Everything was compiled, but it can't be linked. An object may be damaged: ninja goes by times, not by contents.
                linking_failed = all((workspace / name).exists() for name in what.objects())
                if attempt == "with new ones" or not had_objects or not linking_failed:
                    raise
                shutil.rmtree(workspace)
                workspace = cache.directory("objects", workspace.name)
        with cache.lock("native"):  # another checkout may have built the same
            manifest.write(target, (workspace / manifest.LIBRARY).read_bytes(), what.manifest(), private=output is None)
    return target
