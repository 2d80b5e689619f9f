"""Compiles jobs side by side, then times them one at a time.

A compile takes one core for seconds to minutes and the GPU for moments; a measurement wants the GPU for itself. So each
job is prepared (everything compiled, and called once) in a worker process, many at a time, and the process keeps what it
compiled until its turn to measure comes. Without a GPU, or with few cores, jobs are done one after another right here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol
from unittest import mock

import torch

from fusebackend.native.loader import progress_line

Row = dict[str, Any]

#: Kernels that a process compiles at a time: its own part of a compile, which is one thread's, takes longer.
COMPILE_THREADS = 4

#: Below this number of cores nothing is gained by compiling side by side: Inductor's own workers use them.
FEWEST_CORES = 8


class Job(Protocol):
    """Something to compile and time. It is sent to a process, so it names what it needs, and finds it there."""

    @property
    def names(self) -> dict[str, str]:
        """What names its row."""

    @property
    def weight(self) -> int:
        """Jobs of greater weight are begun first: those that take longest to compile."""

    def prepare(self, device: torch.device) -> Callable[[], Row]:
        """Compiles everything, and returns what takes the times."""


@dataclasses.dataclass
class Failure:
    """Why a job gave no row: an exception's type and text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The first two lines: Dynamo's errors name the backend in the first and the reason in the second."""
        return cls(type(error).__name__, " ".join(str(error).split("\n")[:2]).strip())

    @property
    def is_of_memory(self) -> bool:
        """Whether the GPU's memory did not suffice: PyTorch's allocator says so by its type, CUDA and compilers by their text."""
        return self.kind == torch.OutOfMemoryError.__name__ or "out of memory" in self.text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def run(jobs: Sequence[Job], device: torch.device, *, alone: bool) -> Iterator[tuple[Job, Row | Failure]]:
    """Yields each job with its row, as they are measured.

    Args:
        alone: every job gets a process of its own, which ends with it (models, which need much memory); else a process
            prepares one job after another.
    """
    cores = len(os.sched_getaffinity(0))
    if device.type != "cuda" or cores < FEWEST_CORES:
        return _here(jobs, device)
    workers = min(cores - 2, len(jobs))
    return _Pool(jobs, alone, workers).run()


def _here(jobs: Sequence[Job], device: torch.device) -> Iterator[tuple[Job, Row | Failure]]:
    for i, job in enumerate(jobs, 1):
        torch._dynamo.reset()
        with progress_line(f"{' '.join(job.names.values())} ({i} of {len(jobs)})") as progress:
            progress("compiling")
            result = _attempt(job.prepare, device)
            if not isinstance(result, Failure):
                progress("measuring")
                result = _attempt(result)
        yield job, result


def _attempt(call: Callable, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        return Failure.of(error)


def patiently(call: Callable, *arguments: Any) -> Any:
    """``call(*arguments)``, again later while other processes have taken the GPU's memory for a moment."""
    for _ in range(5):
        try:
            return call(*arguments)
        except Exception as error:
            if not Failure.of(error).is_of_memory:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(3)
    return call(*arguments)


# ---- processes ----


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | None = None  # what it is at
    done: int = 0


class _Pool:
    def __init__(self, jobs: Sequence[Job], alone: bool, workers: int):
        self.waiting = collections.deque(sorted(jobs, key=lambda job: -job.weight))
        self.crowded: collections.deque[Job] = collections.deque()  # what found no memory beside the others: once more, after them
        self.last_try: set[str] = set()
        self.total = len(jobs)
        self.alone, self.limit = alone, workers
        self.workers: list[_Worker] = []
        self.ready: collections.deque[tuple[_Worker, Job]] = collections.deque()
        self.measuring: _Worker | None = None
        self.ended: list[Any] = []
        self.context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="fusebackend-bench-")  # of lock files

    def run(self) -> Iterator[tuple[Job, Row | Failure]]:
        began, patience = time.perf_counter(), 0
        try:
            with self.folder, progress_line("compiling") as progress:
                while self.waiting or self.ready or self.crowded or self._working():
                    self._assign()
                    yield from self._receive()
                    left = len(self.waiting) + len(self.crowded) + self._busy()
                    progress(f"{self.total - left} of {self.total}, {time.perf_counter() - began:.0f} s")
            patience = 3
        finally:  # also when the run is stopped: nobody may go on using the GPU
            for worker in list(self.workers):
                self._end(worker)
            for process in self.ended:
                process.join(patience)
                process.kill()

    def _busy(self) -> int:
        return sum(w.job is not None and w is not self.measuring for w in self.workers)

    def _working(self) -> bool:
        return any(w.job for w in self.workers)

    def _assign(self) -> None:
        if self.crowded and not (self.waiting or self.ready or self._working()):
            for worker in list(self.workers):  # idle processes keep memory too
                self._end(worker)
            self.waiting.append(self.crowded.popleft())
        while self.waiting and self._busy() < self.limit:
            free = [] if self.alone else [w for w in self.workers if w.job is None]
            if not free and (self.alone or len(self.workers) < self.limit):
                free = [self._start()]
            if not free:
                break
            worker = free[0]
            worker.job = self.waiting.popleft()
            worker.connection.send(("prepare", worker.job))
        # A compile takes cores from a step whose kernels are short: beside four of them equal code was timed at 0.95.
        if self.ready and not (self.waiting or self._working()):
            worker, job = self.ready.popleft()
            self.measuring, worker.job = worker, job
            worker.connection.send(("measure", job))

    def _receive(self) -> Iterator[tuple[Job, Row | Failure]]:
        by_connection: dict[Any, _Worker] = {w.connection: w for w in self.workers if w.job}
        for found in wait(list(by_connection)):
            worker = by_connection[found]
            job, measured = worker.job, worker is self.measuring
            assert job is not None  # only those are waited for
            try:
                result: Any = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join(5)
                result = Failure("the worker process ended", f"exit code {worker.process.exitcode}")
            worker.job = None
            if measured:
                self.measuring = None
            if isinstance(result, Failure) or measured:
                if self.alone or not worker.process.is_alive():
                    self._end(worker)
                if isinstance(result, Failure) and result.is_of_memory and repr(job) not in self.last_try:
                    self.last_try.add(repr(job))
                    self.crowded.append(job)
                else:
                    yield job, result
            else:
                self.ready.append((worker, job))

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs, self.folder.name))
        with mock.patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS=str(COMPILE_THREADS)):
            process.start()
        theirs.close()
        self.workers.append(_Worker(process, ours))
        return self.workers[-1]

    def _end(self, worker: _Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
        self.ready = collections.deque(r for r in self.ready if r[0] is not worker)
        worker.connection.close()  # which it takes as the end
        self.ended.append(worker.process)


def _with_seconds(measure: Callable[[], Row], seconds: float) -> Row:
    return {**measure(), "prepared_s": seconds}


def _work(connection: Connection, folder: str) -> None:
    """What a worker process does: prepares jobs, keeps them, and measures them when it is told to."""
    from fusebackend.bench.device_time import this_device
    from fusebackend.bench.turns import Turns

    warnings.simplefilter("ignore")  # Inductor's advice on the models
    sys.stdout = sys.stderr
    turns = Turns(folder)
    prepared: dict[str, Callable[[], Row]] = {}
    while True:
        try:
            what, job = connection.recv()
        except EOFError:
            return
        began = time.perf_counter()
        if what == "prepare":
            with turns.preparing():
                result = _attempt(job.prepare, this_device())
            if not isinstance(result, Failure):
                prepared[repr(job)] = functools.partial(_with_seconds, result, round(time.perf_counter() - began, 1))
                result = None
            gc.collect()
            torch.cuda.empty_cache()
        else:
            with turns.measuring():
                result = _attempt(prepared.pop(repr(job)))
        connection.send(result)
