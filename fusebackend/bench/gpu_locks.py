"""Locks between processes that share a GPU, so that what one of them times is not disturbed by what the others run.

There are two lock files. A process that measures holds the first exclusively; one that runs a compiled graph holds it shared. A
process that times kernels to choose between them (the gate; autotuning, in a compile or at a kernel's first call) holds the
second exclusively; runs of a graph hold it shared, from a graph's second run on. A first run mostly loads kernels, and takes
seconds in which the GPU does little.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.benchmarking import benchmarker

from fusebackend.profitability import timer
from fusebackend.profitability.budget import clock_standing


class GpuLocks:
    """This process's hold of the lock files in ``folder``."""

    def __init__(self, folder: str):
        self._measuring, self._timing = (_FileLock(Path(folder, name)) for name in ("measuring", "timing"))
        self._preparing = False

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Within, graphs that Inductor compiled take the locks that they need, and so do autotuning and the gate."""
        with contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(CompiledFxGraph, "__call__", self._running(CompiledFxGraph.__call__)))
            for owner, name in ((benchmarker, "benchmark_gpu"), (timer, "times_ms")):
                patched.enter_context(mock.patch.object(owner, name, self._choosing(getattr(owner, name))))
            self._preparing = True
            try:
                yield
            finally:
                self._preparing = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, no other process runs compiled graphs."""
        with self._measuring.hold(exclusive=True):
            yield

    def _running(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._preparing:  # the patched function was kept by somebody
                return call(graph, *args, **kwargs)
            second_run = _ran_before(graph)
            with self._measuring.hold(exclusive=False), self._timing.hold(exclusive=False) if second_run else contextlib.nullcontext():
                try:
                    return call(graph, *args, **kwargs)
                finally:
                    torch.cuda.synchronize()

        return run

    def _choosing(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def time(*args: Any, **kwargs: Any) -> Any:
            with self._timing.hold(exclusive=True):
                return call(*args, **kwargs)

        return time


def _ran_before(graph: Any) -> bool:
    ran, graph._fusebackend_bench_ran = getattr(graph, "_fusebackend_bench_ran", False), True
    return ran


class _FileLock:
    """A lock between processes. Within a hold it may be taken again: exclusively within a shared hold, and then it stays exclusive."""

    def __init__(self, path: Path):
        self._file = open(path, "w")
        self._state = fcntl.LOCK_UN

    @contextlib.contextmanager
    def hold(self, exclusive: bool) -> Iterator[None]:
        before = self._state
        self._take(fcntl.LOCK_EX if exclusive or before == fcntl.LOCK_EX else fcntl.LOCK_SH)
        try:
            yield
        finally:
            self._take(before)

    def _take(self, state: int) -> None:
        if state != self._state:
            with clock_standing():
                fcntl.flock(self._file, state)
            self._state = state
