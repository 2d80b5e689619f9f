"""Calibrations for tests of what follows from a decision: replacements take one time and what Inductor does another, at any size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from fusebackend.profitability import calibration
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.time_model import TimeModel

#: Kinds of work that only replacements make.
OURS = (
    *("permute", "transpose_add", "index_add", "index_plan", "causal_conv1d", "causal_conv1d backward", "fp32_matmul"),
    *("depthwise_conv", "depthwise_conv of x", "depthwise_conv of weight", "sdpa", "column_moments"),
    *("computed sums", "computed rows"),
)
#: Kinds on CPUs that Inductor's form makes; and the names of the quantities of all kinds there.
_CPU_THEIRS = (
    *("copy", "strided copy", "sum", "stream", "inductor scatter", "aten scatter_add", "aten index_put"),
    *("depthwise conv", "depthwise conv backward", "depthwise conv2d", "depthwise conv2d backward"),
)
_CPU_QUANTITIES = (
    *("bytes", "elements", "runs", "read", "written", "gathered", "adds", "entries", "atomics", "queue", "sectors", "swaps", "launches"),
    *("copied bytes", "pointwise bytes", "products", "activations", "outputs", "sums in waves", "samples"),
    *("results", "results of x", "products of x", "products of weight", "partial bytes"),
)

#: What Inductor's form takes, in microseconds; and what a replacement takes that surely pays, and one that surely does not.
THEIRS_US, FASTER_US, SLOWER_US = 100.0, 10.0, 1000.0


class _AnyRate(dict):
    """Whatever there is takes no time."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return float("inf")


class _AnyKind(dict):
    def __init__(self, ours_us: float):
        super().__init__()
        self._ours_us = ours_us

    def get(self, kind, default=None):
        us = self._ours_us if kind.removesuffix(" cpu") in OURS else THEIRS_US
        return TimeModel(us, _AnyRate(), 1.0, noise=0.1)


def stand_in(ours_us: float) -> Calibration:
    """Of any device, for any kind of work."""
    return Calibration("a stand-in", torch.__version__, "2026-01-01", 0, _AnyKind(ours_us), {})


def write(cache: Path, ours_us: float) -> None:
    """The user's own calibration of this CPU in a cache folder, for other processes."""
    rates = dict.fromkeys(_CPU_QUANTITIES, 1e30)
    kinds = {kind: THEIRS_US for kind in _CPU_THEIRS} | {kind: ours_us for kind in OURS}
    models = {f"{kind} cpu": dataclasses.asdict(TimeModel(us, rates, 1.0, noise=0.1)) for kind, us in kinds.items()}
    device = calibration.device_name(torch.device("cpu"))
    data = {"format": calibration.FORMAT, "type": "cpu", "device": device, "torch_version": torch.__version__, "date": "2026-01-01"}
    data |= {"sites": 0, "call": 0.0, "properties": {}, "models": models}
    folder = cache / "calibrations"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "stand-in.json").write_text(json.dumps(data))
