"""The GPU is shared by processes that compile: none runs what it compiled while another one times something.

What is chosen by timing during a compile (autotuning, the gate) would else depend on what the others were doing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.benchmarking import benchmarker


@contextlib.contextmanager
def taken(path: str) -> Iterator[None]:
    """Within, compiled graphs of this process hold the lock file at ``path`` together with those of others while they run,
    and timings hold it alone."""
    with open(path) as file:
        lock = _Lock(file.fileno())
        with (
            mock.patch.object(CompiledFxGraph, "__call__", lock.around(CompiledFxGraph.__call__, alone=False)),
            mock.patch.object(benchmarker, "benchmark_gpu", lock.around(benchmarker.benchmark_gpu, alone=True)),
        ):
            try:
                yield
            finally:
                lock.open = False


class _Lock:
    def __init__(self, file: int):
        self._file = file
        self.open = True  # what was compiled may keep a function that takes the lock
        self._state = fcntl.LOCK_UN

    @contextlib.contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        """A timing within a run (autotuning at the first call) gives up what is held to get all of it, and takes it back."""
        before = self._state
        self._take(fcntl.LOCK_EX if alone or before == fcntl.LOCK_EX else fcntl.LOCK_SH)
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._take(before)

    def _take(self, state: int) -> None:
        if self.open and state != self._state:
            fcntl.flock(self._file, state)
            self._state = state

    def around(self, call: Callable, alone: bool) -> Callable:
        @functools.wraps(call)
        def held(*args: Any, **kwargs: Any) -> Any:
            with self.hold(alone):
                return call(*args, **kwargs)

        return held
