"""Times several calls in interleaved rounds: what ``bench models`` compares."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusebackend.bench.stats import relative_uncertainty
from fusebackend.garbage import collection_paused

#: One entry of a round spans about this many ms: the mean of calls on CUDA, the shortest of calls on a CPU.
CUDA_SPAN_MS, CPU_SPAN_MS = 50, 250

#: Rounds end early once the ratios of the calls are known to this part.
KNOWN_TO = 3e-3


def interleaved_ms(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float = 6.0, rounds: int = 7
) -> dict[str, list[float]]:
    """Times calls in rounds, A B, B A, A B, ..., so that what changes over time (clocks, other load) affects all of them alike.

    On CUDA one entry of a round is the mean of consecutive calls that are not waited for in between, as in a training loop. On a
    CPU it is the shortest call, since other load can only add time. Garbage is collected before the rounds and not during them: a
    collection of what compilers leave behind takes longer than many a step. The entries of a round begin with the same seed, so that
    models which drop layers at random (layerdrop) drop the same ones.

    Args:
        seconds: about how long to measure, unless the ratio of any two calls is known to 0.3 % earlier
            (:func:`~fusebackend.bench.stats.relative_uncertainty`).
        rounds: the least number of rounds.

    Returns:
        ms a call, one number a round, by name. Numbers at the same position were taken in the same round.
    """
    for call in calls.values():
        call()
    span_ms = CUDA_SPAN_MS if device.type == "cuda" else CPU_SPAN_MS
    repeats = {name: max(1, round(span_ms / _entry_ms(call, 1, device))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    with collection_paused():
        began = time.perf_counter()
        while True:
            for name in names:
                torch.manual_seed(len(times[name]))
                times[name].append(_entry_ms(calls[name], repeats[name], device))
            names.reverse()
            late = time.perf_counter() - began > seconds
            first = times[names[0]]
            if len(first) >= rounds and (late or max(relative_uncertainty(t, first) for t in times.values()) < KNOWN_TO):
                return times


def _entry_ms(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """ms a call: the mean of ``repeats`` calls on CUDA, the shortest of them on a CPU."""
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
