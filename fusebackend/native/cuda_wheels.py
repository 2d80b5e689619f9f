"""The CUDA toolkit as pip installs it, for those who have torch by pip and no toolkit: where it lies, and how to get it.

``cuda-toolkit`` is NVIDIA's package of packages; each of its versions pins compiler, headers and runtime to one another, and torch pins it.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

#: What is needed to compile, as extras of ``cuda-toolkit``; pyproject.toml has them too.
PARTS = ("cccl", "crt", "cudart", "nvcc", "nvvm")

#: The first CUDA whose packages on PyPI have nvcc itself; those before have ptxas only.
_FIRST_WITH_NVCC = 13
_FIRST_VERSION = "13.0"


def homes() -> list[Path]:
    """The toolkits in this environment's site-packages, ``nvidia/cu13``, highest version first."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # something else is called so
        found = None
    folders = [Path(p) for p in found.submodule_search_locations or ()] if found else []
    return sorted((home for folder in folders for home in folder.glob("cu[0-9]*") if (home / "bin/nvcc").is_file()), reverse=True)


def how_to_get_nvcc() -> str:
    """What to do to have nvcc: the command for this Python, torch and driver."""
    import torch  # not above: the command line reads compilers' names before it needs torch

    built_for, driver = torch.version.cuda, driver_version()
    if built_for is None:
        return "install the CUDA toolkit, or set CUDA_HOME"
    version = built_for
    if int(built_for.split(".")[0]) < _FIRST_WITH_NVCC:
        if driver is None or int(driver.split(".")[0]) < _FIRST_WITH_NVCC:
            return f"install the CUDA toolkit {built_for} from NVIDIA, or set CUDA_HOME (pip has no nvcc before CUDA {_FIRST_VERSION})"
        version = _FIRST_VERSION  # the library has its own runtime inside: that the driver knows it is enough
    command = [sys.executable, "-m", "pip", "install", f"cuda-toolkit[{','.join(PARTS)}]=={version}.*"]
    return f"{shlex.join(command)} (or set CUDA_HOME to a CUDA toolkit)"


def how_to_get_runtime(machine: str, cxx: str, nvcc_version: str) -> str:
    """What to do to have the CUDA runtime of another kind of host, in nvcc's version (``compiler_version``)."""
    release = re.search(r"release (\d+\.\d+)", nvcc_version)
    package = f"nvidia-cuda-runtime=={release[1]}.*" if release else "nvidia-cuda-runtime"
    options = ["--no-deps", "--only-binary=:all:", "--platform", f"manylinux_2_17_{machine}", "--target", "FOLDER"]
    command = [sys.executable, "-m", "pip", "install", *options, package]
    return f"{shlex.join(command)}, then CXX={shlex.quote(f'{cxx} -LFOLDER/nvidia/cu13/lib')}"


def driver_version() -> str | None:
    """The newest CUDA that the driver knows, e.g. ``13.0``; None where there is no driver."""
    import torch

    asked = getattr(torch._C, "_cuda_getDriverVersion", None)  # torch without CUDA lacks it
    number = asked() if asked is not None else 0
    return f"{number // 1000}.{number % 1000 // 10}" if number > 0 else None
