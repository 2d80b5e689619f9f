"""Processes that compile side by side share a GPU: who times something there is not disturbed by what the others run.

Two lock files. Who measures holds the first alone, and whoever runs a compiled graph shares it. Who times kernels to choose
between them (the gate; autotuning, during a compile or at a kernel's first call) holds the second alone; runs share it from their
second on: a first one is mostly loading of kernels, and takes seconds in which the GPU does little.
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


class Turns:
    """This process's hold of the lock files in ``folder``."""

    def __init__(self, folder: str):
        self._measuring, self._timing = (_Lock(Path(folder, name)) for name in ("measuring", "timing"))
        self._preparing = False

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Within, graphs that Inductor compiled take their turns, and so do autotuning and the gate."""
        with contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(CompiledFxGraph, "__call__", self._running(CompiledFxGraph.__call__)))
            for owner, name in ((benchmarker, "benchmark_gpu"), (timer, "medians_ms")):
                patched.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            self._preparing = True
            try:
                yield
            finally:
                self._preparing = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, no other process runs compiled graphs."""
        with self._measuring.hold(alone=True):
            yield

    def _running(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._preparing:  # somebody has kept this function
                return call(graph, *args, **kwargs)
            with self._measuring.hold(alone=False), self._timing.hold(alone=False) if _seen(graph) else contextlib.nullcontext():
                try:
                    return call(graph, *args, **kwargs)
                finally:
                    torch.cuda.synchronize()

        return run

    def _timed(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def time(*args: Any, **kwargs: Any) -> Any:
            with self._timing.hold(alone=True):
                return call(*args, **kwargs)

        return time


def _seen(graph: Any) -> bool:
    seen, graph._fusebackend_bench_seen = getattr(graph, "_fusebackend_bench_seen", False), True
    return seen


class _Lock:
    """A lock between processes which may be taken again within; alone within a shared hold, then all of it is taken anew."""

    def __init__(self, path: Path):
        self._file = open(path, "w")
        self._state = fcntl.LOCK_UN

    @contextlib.contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        before = self._state
        self._take(fcntl.LOCK_EX if alone or before == fcntl.LOCK_EX else fcntl.LOCK_SH)
        try:
            yield
        finally:
            self._take(before)

    def _take(self, state: int) -> None:
        if state != self._state:
            fcntl.flock(self._file, state)
            self._state = state
