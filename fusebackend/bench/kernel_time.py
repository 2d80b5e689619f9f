"""The time of a few kernels among others: what models of time are fitted to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fusebackend.bench.device_time import CYCLES_PER_SECOND, FLUSH_BYTES

#: Calls that are timed, at most, and at least; and about how many milliseconds they may take together, on a GPU and on a CPU.
_MOST_CALLS, _LEAST_CALLS, _SPAN_MS, _CPU_SPAN_MS = 25, 5, 15, 100
#: The least time for which a device waits until what is timed is enqueued.
_LEAST_SPIN = 40e-6
#: Calls from whose time that of one call on the host is taken, and how often.
_HOST_CALLS, _HOST_REPEATS = 200, 9


class Timer(Protocol):
    """Times calls."""

    def us(self, fn: Callable[[], Any]) -> float:
        """The median time of ``fn()`` in microseconds."""

    def host_us(self, fn: Callable[[], Any]) -> float:
        """The median time in microseconds until ``fn()`` returns."""


def kernel_timer(device: torch.device) -> Timer:
    return _CudaTimer() if device.type == "cuda" else _CpuTimer()


class _CpuTimer:
    def us(self, fn: Callable[[], Any]) -> float:
        fn()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < _LEAST_CALLS or (time.perf_counter() - began < 1e-3 * _CPU_SPAN_MS and len(times) < 20 * _MOST_CALLS):
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)

    host_us = us


class _CudaTimer:
    """The device's time between two events, with the L2 cache flushed before, less what the events themselves take: the time by which a
    stream of kernels becomes longer."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._events = 0.0
        x = torch.zeros(1, device="cuda")
        one = self.us(lambda: x.add_(1))
        nine = self.us(lambda: [x.add_(1) for _ in range(9)])
        self._events = one - (nine - one) / 8

    def us(self, fn: Callable[[], Any]) -> float:
        fn()
        torch.cuda.synchronize()
        began = time.perf_counter()
        fn()
        spin = int(max(2 * (time.perf_counter() - began), _LEAST_SPIN) * CYCLES_PER_SECOND)
        torch.cuda.synchronize()
        first = self._enqueue(fn, spin)
        torch.cuda.synchronize()
        count = math.ceil(_SPAN_MS / max(first[0].elapsed_time(first[1]), 1e-3))
        events = [self._enqueue(fn, spin) for _ in range(min(_MOST_CALLS, max(_LEAST_CALLS, count)))]
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events) - self._events

    def host_us(self, fn: Callable[[], Any]) -> float:
        times = []
        for _ in range(_HOST_REPEATS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(_HOST_CALLS):
                fn()
            times.append((time.perf_counter() - began) / _HOST_CALLS)
        return 1e6 * statistics.median(times)

    def _enqueue(self, fn: Callable[[], Any], spin: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(spin)  # the device waits until everything is enqueued
        start.record()
        fn()
        end.record()
        return start, end
