"""The time of one call: what ``bench kernels`` compares, and the device's part of what ``bench models`` does."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

#: Zeroed before each timed call: larger than any GPU's L2 cache.
FLUSH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Effort:
    """How many calls are timed.

    Attributes:
        least, most, span_ms: on CUDA as many as take about ``span_ms``, within these numbers.
        cpu_most, cpu_seconds: on a CPU at least five, then more until so many seconds have passed, ``cpu_most`` at most.
    """

    least: int
    most: int
    span_ms: float
    cpu_most: int
    cpu_seconds: float


#: For the rows of a table.
TABLE = Effort(least=3, most=100, span_ms=60, cpu_most=1000, cpu_seconds=0.5)

#: The clock that spinning is converted to cycles with: about that of the GPUs in use.
CYCLES_PER_SECOND = 2e9


def median_ms(fn: Callable[[], Any], device: torch.device, effort: Effort = TABLE) -> float:
    """The median time of ``fn()`` in ms, after a first call that is not timed.

    On CUDA it is the device's time between two events around the call, with the L2 cache flushed before each call. On a CPU it
    is wall-clock time.
    """
    return _median_cuda_ms(fn, effort) if device.type == "cuda" else _median_cpu_ms(fn, effort)


def busy_ms(fn: Callable[[], Any], calls: int) -> float | None:
    """How long a GPU computes, copies and fills in ``fn()``, in ms: the mean of ``calls`` calls, after one that does not count.

    What it takes between two events holds what it waits for the host, too, where ``fn`` launches more kernels than CUDA's queue holds
    (about a thousand): the rest is enqueued while it runs. Where kernels run at once, as one that is launched before its predecessor
    has ended, the time counts once.

    Returns:
        None where the profiler sees nothing: it may not be permitted, or another has the GPU's counters.
    """
    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end) for e in found.events() if e.device_type == DeviceType.CUDA]
    return covered(spans) / calls / 1e3 or None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line spans ``(begin, end)`` cover together."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _median_cpu_ms(fn: Callable[[], Any], effort: Effort) -> float:
    fn()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < effort.cpu_seconds and len(times) < effort.cpu_most):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _median_cuda_ms(fn: Callable[[], Any], effort: Effort) -> float:
    """The device spins before each call until the host has enqueued all of it. The host may need longer than the device for a compiled
    backward; a training loop hides that behind the device's earlier work, but between two events it would be counted."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    fn()
    torch.cuda.synchronize()
    began = time.perf_counter()
    fn()
    spin_cycles = int(2 * (time.perf_counter() - began) * CYCLES_PER_SECOND)  # twice what enqueuing took
    torch.cuda.synchronize()

    def enqueue() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(spin_cycles)
        start.record()
        fn()
        end.record()
        return start, end

    start, end = enqueue()
    torch.cuda.synchronize()
    count = round(effort.span_ms / start.elapsed_time(end))
    events = [enqueue() for _ in range(min(effort.most, max(effort.least, count)))]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)
