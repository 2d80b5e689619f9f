"""The time of a few kernels among others: what models of time are fitted to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fusebackend.bench.device_time import Effort, median_ms

#: For thousands of sites.
_BRIEF = Effort(least=5, most=25, span_ms=15, cpu_most=500, cpu_seconds=0.1)
#: Calls from whose time that of one call on the host is taken, and how often.
_HOST_CALLS, _HOST_REPEATS = 200, 9


class KernelTimer:
    """Times calls on a device: by how much they make a stream of kernels longer.

    On CUDA that is the device's time between two events around a call, less what the events themselves take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, 0.0
        if device.type == "cuda":
            x = torch.zeros(1, device=device)
            one = self.us(lambda: x.add_(1))
            nine = self.us(lambda: [x.add_(1) for _ in range(9)])
            self._events = one - (nine - one) / 8

    def us(self, fn: Callable[[], Any]) -> float:
        """The median time of ``fn()`` in microseconds."""
        return 1e3 * median_ms(fn, self._device, _BRIEF) - self._events

    def host_us(self, fn: Callable[[], Any]) -> float:
        """The median time in microseconds until ``fn()`` returns, on CUDA."""
        times = []
        for _ in range(_HOST_REPEATS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(_HOST_CALLS):
                fn()
            times.append((time.perf_counter() - began) / _HOST_CALLS)
        return 1e6 * statistics.median(times)
