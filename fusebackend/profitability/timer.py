"""Times several functions that compute the same, alternately, on the same random inputs."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

_MIN_RUNS, _MAX_RUNS = 3, 30
_LAUNCH_MS = 0.2  # enough for launching a few kernels
_MAX_LAUNCH_MS = 20.0
_CYCLES_PER_MS = 1.5e6  # of a GPU at 1.5 GHz

# Two timings at once would slow each other down.
_one_at_a_time = threading.Lock()


class Inputs(Protocol):
    """What draws the inputs of the functions that are timed (:class:`fusebackend.profitability.random_inputs.Samples`).

    Attributes:
        mutated: the numbers of those that the functions write to.
    """

    mutated: list[int]

    def settle(self, form: Callable[[list[Any]], Any]) -> None:
        """Finds out how inputs are to be drawn for a function."""

    def draw(self) -> list[Any]:
        """New ones."""


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """A block without fake tensors, autograd and autocast, in one thread at a time; afterwards the random state is as it was."""
    devices = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    with (
        _one_at_a_time,
        torch.utils._python_dispatch._disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
        torch.cuda.device(device) if devices else contextlib.nullcontext(),
    ):
        yield


def times_ms(
    ways: Sequence[Callable[[list[Any]], Any]],
    samples: Inputs,
    device: torch.device,
    *,
    seconds: float = 0.3,
    draws: int = 3,
    launches: bool = False,
) -> list[float]:
    """The time of each function in milliseconds: the median, over several draws of random inputs, of the shortest run with each.

    Whatever else the machine does makes a run longer: another process may use the GPU too, and a busy CPU may launch late. On CUDA the L2
    cache is flushed before each run.

    Args:
        ways: functions of a list of inputs, which they may empty. The last decides how inputs are drawn.
        samples: draws the inputs; those that are mutated are restored before each run.
        seconds: about how long to measure, for all functions and draws together.
        draws: how many times inputs are drawn.
        launches: on CUDA, whether the time that the CPU takes to launch the kernels counts where it is longer.
    """
    timer = _CudaTimer(device, launches) if device.type == "cuda" else _cpu_ms
    samples.settle(ways[-1])
    found: list[list[float]] = [[] for _ in ways]
    began = time.perf_counter()
    for draw in range(draws):
        if draw and time.perf_counter() - began > 2 * seconds:
            break  # the first draw took all the time
        inputs = samples.draw()
        # Whole storages, since a function may use their memory for other results.
        pristine = [(inputs[i].untyped_storage(), inputs[i].untyped_storage().clone()) for i in samples.mutated]

        def run(way: Callable, inputs: list[Any] = inputs, pristine: list = pristine) -> float:
            for storage, kept in pristine:
                storage.copy_(kept)
            given = list(inputs)
            return timer(lambda: way(given))

        if not draw:
            for way in ways:  # autotunes, allocates
                run(way)
            began = time.perf_counter()
        round_ms = sum(run(way) for way in ways)
        runs = int(1e3 * seconds / draws / max(round_ms, 1e-3))
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(min(max(runs, _MIN_RUNS), _MAX_RUNS)):
            for kept, way in zip(times, ways):
                kept.append(run(way))
        for kept, of_draw in zip(found, times):
            kept.append(min(of_draw))
        del inputs, pristine
    return [statistics.median(of_way) for of_way in found]


def once_ms(way: Callable[[list[Any]], Any], device: torch.device) -> float:
    """The time of one call without inputs, in milliseconds."""
    return (_CudaTimer(device, launches=False) if device.type == "cuda" else _cpu_ms)(lambda: way([]))


def _cpu_ms(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


class _CudaTimer:
    def __init__(self, device: torch.device, launches: bool):
        properties = torch.cuda.get_device_properties(device)
        self._cache = torch.empty(max(2 * getattr(properties, "L2_cache_size", 0), 1 << 26), dtype=torch.int8, device=device)
        self._launches = launches
        self._launch_ms = _LAUNCH_MS

    def __call__(self, call: Callable[[], Any]) -> float:
        # Not the whole device: on another stream a collective may wait for a rank that waits for what is found here.
        stream = torch.cuda.current_stream()
        stream.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._cache.zero_()
        if not self._launches:  # the GPU waits until everything is launched, so that only its own time is measured
            torch.cuda._sleep(int(self._launch_ms * _CYCLES_PER_MS))
        began = time.perf_counter()
        start.record()
        call()
        end.record()
        # The next wait is a fifth longer than this launch took. The limit is for a first call, which may compile.
        self._launch_ms = min(max(_LAUNCH_MS, 1.2e3 * (time.perf_counter() - began)), _MAX_LAUNCH_MS)
        stream.synchronize()
        return start.elapsed_time(end)
