"""The processors that machine code is made for: GPU architectures as nvcc names them, and the CPU's baseline."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch

#: The baseline for which CPU kernels have code of their own (``FUSE_HAS_AVX2`` in csrc).
TUNED_BASELINE = "x86-64-v3"


def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture for a compute capability, e.g. ``"90a"`` for (9, 0)."""
    return "90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"


def device_architectures() -> tuple[str, ...]:
    """The architectures of this machine's GPUs; empty where torch sees none."""
    if not torch.cuda.is_available():
        return ()
    return tuple(sorted({architecture_of(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())}))


def is_architecture(name: str) -> bool:
    number = name.removesuffix("a")
    return number.isascii() and number.isdigit() and 70 <= int(number) <= 129


def covers(built: tuple[str, ...], wanted: str) -> bool:
    """Whether a library that was built for ``built`` runs on ``wanted``: by machine code for it or for a lower minor version of the same
    major one, or by PTX for an older one."""
    if wanted in built:
        return True
    number = int(wanted.removesuffix("a"))
    return any(a.isdigit() and int(a) <= number for a in built)


def cpu_baseline(machine: str | None = None) -> str:
    """The ``-march`` that CPU kernels are compiled for. Not ``native``: one library may serve several machines.

    Args:
        machine: the kind of host that they are for, e.g. ``"aarch64"``; by default this one.
    """
    here = platform.machine()
    if (machine or here) == "x86_64" and (here != "x86_64" or {"avx2", "fma", "bmi2", "f16c"} <= cpu_flags()):
        return TUNED_BASELINE
    return _BASELINES.get(machine or here, "")


_BASELINES = {"x86_64": "x86-64", "aarch64": "armv8-a"}


def runs_here(march: str) -> bool:
    """Whether this CPU runs what was compiled for ``march``. An empty one is that of a processor without a name here."""
    return march in ("", cpu_baseline(), _BASELINES.get(platform.machine()))


@lru_cache
def cpu_flags() -> frozenset[str]:
    """The processor's feature names from /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))
