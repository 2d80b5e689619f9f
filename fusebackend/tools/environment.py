"""``python -m fusebackend env``: what is there and what is missing."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import fusebackend
from fusebackend.native import build, cache, cuda_wheels, loader
from fusebackend.options import OPTIONS
from fusebackend.profitability import calibration
from fusebackend.rewriting.registry import all_patterns


def print_environment() -> int:
    """Prints versions, devices, compilers, the cache, the library, patterns and options. Returns 0 if there is a library."""
    tools = build.Toolchain.find()
    rows = [
        ("fusebackend", f"{fusebackend.__version__} in {Path(fusebackend.__file__).parent}"),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        ("CPU", f"{platform.machine()}, {torch.get_num_threads()} threads, kernels for {build.cpu_baseline()}"),
    ]
    for i in range(torch.cuda.device_count()):
        rows.append((f"GPU {i}", f"{torch.cuda.get_device_name(i)}, compute capability {torch.cuda.get_device_capability(i)}"))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none that torch sees: CUDA kernels are neither built nor used"))
    driver = cuda_wheels.driver_version()
    if driver:
        rows.append(("driver", f"for CUDA {driver} and before"))
    missing = "none: apt-get install g++, or set CXX"
    rows.append(("C++ compiler", f"{tools.cxx}: {build.compiler_version(tools.cxx)}" if tools.cxx else missing))
    missing = f"none: {cuda_wheels.how_to_get_nvcc()} (needed for CUDA kernels only)"
    rows.append(("nvcc", f"{tools.nvcc}: {build.compiler_version(tools.nvcc)}" if tools.nvcc else missing))
    try:
        rows.append(("cache", str(cache.directory())))
    except cache.CacheError as error:
        rows.append(("cache", str(error)))
    library = loader.load()
    if library.path:
        rows.append(("library", f"{library.path}, for CPU{''.join(f', sm_{a}' for a in library.architectures)}"))
    if library.reason:
        rows.append(("missing", library.reason))
    for kind in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        known = calibration.of_device(torch.device(kind))
        rows.append((f"calibration, {kind.upper()}", str(known) if known else "none: python -m fusebackend calibrate"))
    rows.append(("patterns", ", ".join(p.name for p in all_patterns())))
    rows += [(name, f"{does}; accepts {accepts}") for name, (accepts, does) in OPTIONS.items()]
    for name, text in rows:
        print(f"{name:17} {text}")
    return 0 if library.path else 1
