"""The compilers of this machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from fusebackend.native import cuda_wheels


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The compilers found here, None where there is none, and the CUDA toolkit's folder with headers and runtime.

    A compiler is a command for the shell, e.g. ``/usr/bin/ccache g++``.
    """

    cxx: str | None
    nvcc: str | None
    cuda_home: Path | None = None

    @property
    def machine(self) -> str:
        """The kind of host that the compiler makes code for, as ``platform.machine()`` names it."""
        return target_machine(self.cxx) if self.cxx else platform.machine()

    @property
    def crosses(self) -> bool:
        """Whether that is another than this host."""
        return self.machine != platform.machine()

    @classmethod
    def find(cls) -> Toolchain:
        """Honours ``CXX``, ``CUDACXX``, ``CUDA_HOME`` and ``CUDA_PATH``; the first two may have arguments (``CXX="ccache g++"``).

        nvcc is looked for in ``CUDACXX``, on the ``PATH``, in the homes and in /usr/local/cuda, then in this environment's site-packages.
        """
        named_cxx = os.environ.get("CXX")
        cxx = _command(named_cxx) if named_cxx else next(filter(None, map(_command, ("g++", "c++", "clang++"))), None)
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        candidates = [os.environ.get("CUDACXX"), "nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
        candidates += [str(home / "bin/nvcc") for home in cuda_wheels.homes()]
        nvcc = next(filter(None, (_command(c) for c in candidates if c)), None)
        # An nvcc on the PATH may be a wrapper outside its toolkit.
        beside = Path(os.path.realpath(shlex.split(nvcc)[0])).parents[1] if nvcc else None
        roots = [Path(root) for root in (*homes[:2], beside, homes[2]) if root]
        cuda_home = next((root for root in roots if (root / "include/cuda_runtime_api.h").exists()), None)
        return cls(cxx, nvcc if cuda_home else None, cuda_home)


def _command(text: str) -> str | None:
    """``text``, the path of a program or a program with arguments, as a command with the program's full path; None if there is none."""
    try:
        words = [text] if shutil.which(text) else shlex.split(text)
    except ValueError:  # an unclosed quote
        return None
    program = shutil.which(words[0]) if words else None
    return shlex.join([program, *words[1:]]) if program else None


@lru_cache
def compiler_version(compiler: str) -> str:
    """The line in which a compiler states its version, or why it could not be asked."""
    try:
        text = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unusable: {error}"
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "release" in line), lines[0] if lines else "says nothing")


@lru_cache
def target_machine(compiler: str) -> str:
    """The kind of processor that a C++ compiler makes code for, e.g. ``"aarch64"``; this host's where it does not tell."""
    try:
        asked = subprocess.run([*shlex.split(compiler), "-dumpmachine"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return platform.machine()
    told, separator, _ = asked.stdout.strip().partition("-")
    return {"powerpc64le": "ppc64le"}.get(told, told) if separator and asked.returncode == 0 else platform.machine()


def compiler_flags(compiler: str) -> list[str]:
    """The options in a compiler's command, e.g. ``-O0`` in ``g++ -O0``."""
    return [word for word in shlex.split(compiler)[1:] if word.startswith("-")]
