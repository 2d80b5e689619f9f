"""How times are taken, and on what."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fusebackend import __version__
from fusebackend.native import loader


def this_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def median_ms(fn: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call in ms; on CUDA the device's, with the L2 cache flushed before each."""
    if device.type == "cuda":
        return _median_device_ms(fn)
    fn()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < 0.5 and len(times) < 1000):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _median_device_ms(fn: Callable[[], Any]) -> float:
    """The device spins before each call until the host has enqueued it all: a compiled backward costs the host 0.2 ms and more, which
    in a training loop is spent while the device still works on what came before."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    fn()
    torch.cuda.synchronize()
    began = time.perf_counter()
    fn()
    spin = int(2 * (time.perf_counter() - began) * 2e9)  # cycles, at 2 GHz
    torch.cuda.synchronize()

    def enqueued() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(spin)
        start.record()
        fn()
        end.record()
        return start, end

    start, end = enqueued()
    torch.cuda.synchronize()
    pairs = [enqueued() for _ in range(min(100, max(3, round(60 / start.elapsed_time(end)))))]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def in_turn(calls: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float = 6.0, rounds: int = 7) -> dict[str, list[float]]:
    """Times calls in rounds, A B, B A, ..., so that what changes over time (clocks, other load) changes all alike.

    One entry of a round is the mean of as many calls in a row as take 50 ms, without waiting in between, as in a training
    loop; on a CPU the shortest of as many as take 250 ms, since other load only adds. There are ``rounds`` rounds at
    least, then more until ``seconds`` have passed or the ratio of any two calls is known to 0.3 % (half the distance of
    its quartiles, over the root of the number of rounds). Garbage is collected before and not meanwhile: what compilers
    leave behind takes a collection longer than many a step.

    Returns:
        ms a call, one number a round, by name; the numbers at the same place were taken in the same round.
    """
    for call in calls.values():
        call()
    span = 50 if device.type == "cuda" else 250
    repeats = {name: max(1, round(span / _run(call, 1, device))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    with _no_garbage_collection():
        began = time.perf_counter()
        while True:
            for name in names:
                times[name].append(_run(calls[name], repeats[name], device))
            names.reverse()
            late = time.perf_counter() - began > seconds
            if len(times[names[0]]) >= rounds and (late or max(uncertainty(t, times[names[0]]) for t in times.values()) < 3e-3):
                return times


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def uncertainty(times: list[float], others: list[float]) -> float:
    """How well the ratio of two lists of :func:`in_turn` is known, as a part of it."""
    if len(times) < 3:
        return math.inf
    ratios = [a / b for a, b in zip(times, others)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (high - low) / 2 / middle / math.sqrt(len(ratios))


def _run(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """ms a call."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def geomean(ratios: Iterable[float]) -> float:
    logs = [math.log(r) for r in ratios]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def environment() -> dict[str, Any]:
    """Device, versions and commit: what a figure means nothing without.

    An installed wheel knows no commit; ``FUSEBACKEND_COMMIT`` says it there.
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
    """The commit of the checkout that this file belongs to, ``-dirty`` if it was changed; None for an installed copy."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        return subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
