"""What a measurement was made on: device, versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from fusebackend import __version__
from fusebackend.native import loader


def default_device() -> torch.device:
    """The GPU if torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment() -> dict[str, Any]:
    """Device, versions, commit and date, as they are written beside the figures.

    An installed wheel does not know its commit; the environment variable ``FUSEBACKEND_COMMIT`` names it there.
    """
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{_processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "fusebackend": __version__,
        "library": loader.load().key,
        "commit": os.environ.get("FUSEBACKEND_COMMIT") or _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def clocks(device: torch.device) -> dict[str, float]:
    """A GPU's highest clocks in MHz, as far as torch tells."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    rates = {name: getattr(properties, f"{name}_rate", 0) for name in ("clock", "memory_clock")}
    return {name: rate / 1000 for name, rate in rates.items() if rate}


def describe(environment: dict[str, Any]) -> str:
    """An environment in one line."""
    return ", ".join([environment["device"], *(f"{k} {v}" for k, v in environment.items() if v and k not in ("library", "device"))])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _commit() -> str | None:
    """The commit of the checkout that holds this file, with ``-dirty`` if it was modified; None for an installed copy."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        return subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
