"""How long each kind of work takes on a device: what ``python -m fusebackend calibrate`` measured there, or a guess.

A calibration is a JSON file, one a device and version of torch. One of the user's own (in the cache folder) goes before those that ship
here. Where there is none for a device, a prior is taken: what was found on another one, scaled by what the driver says of both, with wide
intervals.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusebackend import cache_keys
from fusebackend.log import warn_once
from fusebackend.native import cache, loader
from fusebackend.native.architectures import architecture_of, covers
from fusebackend.native.kept_files import decoded
from fusebackend.profitability.time_model import TimeModel
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.device_facts import IMAGINED
from fusebackend.rewriting.pattern import Interval, Work

FOLDER = Path(__file__).with_name("calibrations")

#: A file's layout; files of another one are not read.
FORMAT = 1

#: How much wider intervals are under another minor version of torch than the calibration's: Inductor's kernels change with each.
_OTHER_TORCH = 1.5
#: And where a calibration is that of another device, which runs the same machine code, and where kernels are others.
_OTHER_DEVICE, _OTHER_KERNELS = 2.0, 4.0


# What a file says of a calibration; the rest is found out here.
_IN_FILES = ("device", "torch_version", "date", "sites", "models", "properties", "call", "architecture")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What is known of one device.

    Attributes:
        device: its name.
        torch_version, date: of the measurement.
        sites: how many were measured.
        models: by kind of work.
        widened: the intervals' widths are multiplied by it here.
        scale: a time here over the time there, by the rates of both devices.
        call: microseconds that the host needs for a call of an operator more than for launching a Triton kernel.
        architecture: of the machine code of the kernels that were measured, as nvcc names it; empty if that is not known.
        is_prior: whether it is another device's.
        origin, digest: the file, and a hash of its content.
    """

    device: str
    torch_version: str
    date: str
    sites: int
    models: Mapping[str, TimeModel]
    properties: Mapping[str, float]
    widened: float = 1.0
    scale: float = 1.0
    call: float = 0.0
    architecture: str = ""
    is_prior: bool = False
    origin: str = ""
    digest: str = ""

    def time(self, ways: Sequence[Work]) -> Interval:
        """Of several ways of doing the same, that which is physically fastest, as an autotuner would choose.

        Raises:
            Unfit: the kind of work was not calibrated.
        """
        model = self.models.get(ways[0].kind)
        if model is None:
            raise Unfit(f"how long {ways[0].kind!r} takes was not calibrated: python -m fusebackend calibrate")
        work = min(ways, key=model.physical)
        found = model.time(work, self.widened)
        scale = self.scale * work.share
        return Interval(found.expected * scale, found.low * scale, found.high * scale)

    def memory_us(self, byte_count: float) -> float:
        """The time in which the memory moves so many bytes at best; 0 if its bandwidth is not known.

        The driver names the bits of the bus, times the kHz of a clock at which each wire moves two of them.
        """
        bandwidth = self.properties.get("bandwidth", 0.0)
        return self.scale * byte_count / (bandwidth * 2 / 8 * 1e3 / 1e6) if bandwidth > 0 else 0.0

    @property
    def is_own(self) -> bool:
        """Whether it was measured on this device, under this torch and with the kernels that run."""
        return not self.is_prior and self.widened == 1.0

    def models_here(self) -> dict[str, TimeModel]:
        """The models with rates that are scaled and intervals that are widened, as what they say is taken here."""
        return {name: model.scaled(self.scale, self.widened) for name, model in self.models.items()}

    @property
    def ships(self) -> bool:
        """Whether it is part of this package, and not of the user's own making."""
        return Path(self.origin).parent == FOLDER

    def __str__(self) -> str:
        days = (datetime.date.today() - datetime.date.fromisoformat(self.date)).days
        kernels = f", kernels for sm_{self.architecture}" if self.architecture else ""
        what = f"of {self.device}, torch {self.torch_version}{kernels}, {self.sites} sites, {days} days old ({self.origin})"
        return f"none; a guess from that {what}" if self.is_prior else what


def of_device(device: torch.device) -> Calibration | None:
    """The calibration for a device; None if nothing is known of devices of its type."""
    return for_device(device.type, device_name(device))


def for_device(kind: str, name: str) -> Calibration | None:
    """The same for a type of device, ``"cuda"`` or ``"cpu"``, and the device's name."""
    return _find(kind, name, _own_folder())


@functools.cache
def _find(kind: str, name: str, own: Path | None) -> Calibration | None:
    found = [
        c for folder in (own, FOLDER) if folder is not None for path in sorted(folder.glob("*.json")) if (c := _read(path)) is not None
    ]
    of_kind = [c for device, c in found if device == kind]
    return next(iter(_by_likeness(of_kind, name, torch.__version__, device_properties(torch.device(kind)), architecture(kind))), None)


def _by_likeness(
    found: Sequence[Calibration], device: str, torch_version: str, properties: Mapping[str, float], running: str
) -> list[Calibration]:
    """What each says of a device, the likeliest first: those of the device itself, then guesses by others."""
    known = [_widened(c, running, torch_version) if c.device == device else _prior(c, properties, running) for c in found]
    return sorted(known, key=lambda c: (c.is_prior, c.widened, abs(math.log(c.scale))))


def _widened(known: Calibration, running: str, torch_version: str) -> Calibration:
    """What is known of this device, under the torch and with the kernels that it was made with, or others."""
    widened = 1.0 if _minor(known.torch_version) == _minor(torch_version) else _OTHER_TORCH
    if known.architecture and running and known.architecture != running:
        widened = _OTHER_KERNELS
    return dataclasses.replace(known, widened=widened)


def shipped(kind: str, device: str, torch_version: str, properties: Mapping[str, float], running: str) -> list[Calibration]:
    """The calibrations that ship, for a device, the likeliest first. ``running``: as for :func:`architecture`."""
    files = [found for path in sorted(FOLDER.glob("*.json")) if (found := _read(path)) is not None]
    return _by_likeness([c for of_kind, c in files if of_kind == kind], device, torch_version, properties, running)


def _scale(other: Calibration, properties: Mapping[str, float]) -> float:
    """A time on a device with these properties over that on another: the geometric mean of what the driver says of both."""
    ratios = [math.log(value / properties[name]) for name, value in other.properties.items() if properties.get(name, 0) > 0]
    return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _prior(other: Calibration, properties: Mapping[str, float], running: str) -> Calibration:
    """What is known of another device, as a guess at one with these properties."""
    scale = _scale(other, properties)
    widened = _OTHER_DEVICE if running and other.architecture == running else _OTHER_KERNELS
    return dataclasses.replace(other, widened=widened, scale=scale, is_prior=True)


def architecture(kind: str) -> str:
    """Of the machine code that the library's kernels have for this machine's GPU; empty for CPUs, and where there is none."""
    if kind != "cuda" or not torch.cuda.is_available():
        return ""
    wanted = architecture_of(torch.cuda.get_device_capability())
    built = [a for a in loader.load().architectures if covers((a,), wanted)]
    return wanted if wanted in built else max(built, key=lambda a: int(a.removesuffix("a")), default="")


def forget() -> None:
    """Looks for files anew."""
    _find.cache_clear()


def digest(device: torch.device) -> str:
    """Identifies what is known of a device: estimates, and so compiled code, depend on it."""
    found = of_device(device)
    return "" if found is None else f"{found.digest} {found.widened} {found.scale}"


def device_name(device: torch.device) -> str:
    """A GPU's name, or that of the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else IMAGINED.name
    return f"{cache_keys.cpu_name()}, {torch.get_num_threads()} threads"


def device_properties(device: torch.device) -> dict[str, float]:
    """What scales times between devices: multiprocessors times clock, and the memory's bandwidth, where the driver says."""
    if device.type != "cuda":
        return {"threads": float(torch.get_num_threads())}
    if not torch.cuda.is_available():
        return {}
    p: Any = torch.cuda.get_device_properties(device)
    found = {"multiprocessors": float(p.multi_processor_count)}
    width, clock = getattr(p, "memory_bus_width", 0), getattr(p, "memory_clock_rate", 0)
    return found | ({"bandwidth": float(width * clock)} if width and clock else {})


def own_file(device: str, torch_version: str) -> Path:
    """Where ``calibrate`` keeps what it finds for the device of that name.

    Raises:
        fusebackend.native.cache.CacheError: the cache folder can't be used.
    """
    return cache.directory("calibrations") / f"{re.sub(r'[^A-Za-z0-9]+', '-', device)}-torch{_minor(torch_version)}.json"


def _own_folder() -> Path | None:
    try:
        return cache.directory("calibrations")
    except cache.CacheError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _read(path: Path) -> tuple[str, Calibration] | None:
    try:
        content = path.read_bytes()
        data = json.loads(content)
        if data["format"] != FORMAT:
            return None
        known = decoded(Calibration, {name: data[name] for name in _IN_FILES if name in data})
        datetime.date.fromisoformat(known.date)
        if not all(value > 0 for value in known.properties.values()):
            raise ValueError(f"properties are {known.properties}; positive numbers are needed")
        return data["type"], dataclasses.replace(known, origin=str(path), digest=hashlib.sha256(content).hexdigest())
    except Exception as error:
        warn_once(f"the calibration {path} is not used: {type(error).__name__}: {error}")
        return None
