"""With what, where and when something was compiled."""

from __future__ import annotations

import datetime
import functools
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fusebackend import __version__


def compile_context(options: Mapping[str, Any], inputs: Iterable[Any]) -> dict[str, str]:
    """Versions, the devices of the inputs, the options that were given, and the date in UTC."""
    devices = dict.fromkeys(i.device for i in inputs if isinstance(i, torch.Tensor))
    return {
        "fusebackend": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": ", ".join(map(_device_name, devices)) or "none",
        "options": ", ".join(f"{name}={value!r}" for name, value in options.items()) or "defaults",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return f"{device}: {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu: {_cpu_name()}, {torch.get_num_threads()} threads"
    return str(device)


@functools.cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
