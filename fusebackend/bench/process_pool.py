"""Compiles jobs in parallel worker processes, then measures them one at a time.

A compile takes one core for seconds to minutes and the GPU for moments; a measurement needs the GPU for itself. So each job is
prepared in a worker process (everything is compiled, and called once), and the process keeps the result until all jobs are
prepared and its turn to measure comes. Without a GPU, or with few cores, jobs run one after another in this process.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch

from fusebackend.bench.job import Failure, Job, attempt
from fusebackend.bench.rows import Row
from fusebackend.native.loader import progress_line

#: Threads with which Inductor compiles kernels in one worker. Tracing and scheduling, on a single thread, take longer than that.
COMPILE_THREADS = 4

#: With fewer cores nothing is gained by compiling in parallel: Inductor's own workers use them.
MIN_CORES = 8


@contextlib.contextmanager
def cancelling(pool: concurrent.futures.Executor) -> Iterator[None]:
    """After an error, or Ctrl-C, what ``pool`` has not started yet is not started any more: leaving it would wait for all."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def run(jobs: Sequence[Job], device: torch.device, *, process_per_job: bool) -> Iterator[tuple[Job, Row | Failure]]:
    """Yields each job with its row, as they are measured.

    Args:
        process_per_job: each job gets a process of its own, which ends with it (models, which need much memory); otherwise a
            process prepares one job after another.
    """
    cores = len(os.sched_getaffinity(0))
    if device.type != "cuda" or cores < MIN_CORES:
        return _run_here(jobs, device)
    return ProcessPool(jobs, process_per_job, min(cores - 2, len(jobs))).run()


def _run_here(jobs: Sequence[Job], device: torch.device) -> Iterator[tuple[Job, Row | Failure]]:
    for i, job in enumerate(jobs, 1):
        torch._dynamo.reset()
        with progress_line(f"{' '.join(job.names.values())} ({i} of {len(jobs)})", in_logs=True) as progress:
            progress("compiling")
            result = attempt(job.prepare, device)
            if not isinstance(result, Failure):
                progress("measuring")
                result = attempt(result)
        yield job, result


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | None = None  # being prepared or measured


class ProcessPool:
    """The worker processes of one run."""

    def __init__(self, jobs: Sequence[Job], process_per_job: bool, workers: int):
        self.process_per_job, self.max_workers = process_per_job, workers
        self.total = len(jobs)
        self.waiting = collections.deque(sorted(jobs, key=lambda job: -job.weight))
        self.ready: collections.deque[tuple[_Worker, Job]] = collections.deque()  # prepared, to be measured
        self.out_of_memory: collections.deque[Job] = collections.deque()  # to be repeated when no other process holds memory
        self.repeated: set[str] = set()
        self.workers: list[_Worker] = []
        self.measuring: _Worker | None = None
        self.ended: list[Any] = []
        self.context = multiprocessing.get_context("spawn")
        self.lock_folder = tempfile.TemporaryDirectory(prefix="fusebackend-bench-")

    def run(self) -> Iterator[tuple[Job, Row | Failure]]:
        began, patience = time.perf_counter(), 0
        try:
            with self.lock_folder, progress_line("compiling", in_logs=True) as progress:
                while self.waiting or self.ready or self.out_of_memory or self._working():
                    self._assign()
                    yield from self._receive()
                    unprepared = len(self.waiting) + len(self.out_of_memory) + self._preparing()
                    progress(f"{self.total - unprepared} of {self.total}, {time.perf_counter() - began:.0f} s")
            patience = 3
        finally:  # also when the run is stopped: no process may go on using the GPU
            for worker in list(self.workers):
                self._end(worker)
            for process in self.ended:
                process.join(patience)
                process.kill()

    def _preparing(self) -> int:
        return sum(w.job is not None and w is not self.measuring for w in self.workers)

    def _working(self) -> bool:
        return any(w.job for w in self.workers)

    def _assign(self) -> None:
        """Gives jobs to workers: to prepare, as long as there are any and workers for them; then to measure, one."""
        if self.out_of_memory and not (self.waiting or self.ready or self._working()):
            for worker in list(self.workers):  # idle processes hold memory too
                self._end(worker)
            self.waiting.append(self.out_of_memory.popleft())
        while self.waiting and self._preparing() < self.max_workers:
            free = [] if self.process_per_job else [w for w in self.workers if w.job is None]
            if not free and (self.process_per_job or len(self.workers) < self.max_workers):
                free = [self._start()]
            if not free:
                break
            worker = free[0]
            worker.job = self.waiting.popleft()
            worker.connection.send(("prepare", worker.job))
        # A compile takes cores from a step whose kernels are short, which is then measured too slow: nothing may be compiled meanwhile.
        if self.ready and not (self.waiting or self._working()):
            worker, job = self.ready.popleft()
            self.measuring, worker.job = worker, job
            worker.connection.send(("measure", job))

    def _receive(self) -> Iterator[tuple[Job, Row | Failure]]:
        """Waits for a worker's answer, and yields the jobs that are done with it."""
        by_connection: dict[Any, _Worker] = {w.connection: w for w in self.workers if w.job}
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]
            job, measured = worker.job, worker is self.measuring
            assert job is not None  # no other worker is waited for
            try:
                result: Any = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join(5)
                result = Failure("the worker process ended", f"exit code {worker.process.exitcode}")
            worker.job = None
            if measured:
                self.measuring = None
            if isinstance(result, Failure) or measured:
                if self.process_per_job or not worker.process.is_alive():
                    self._end(worker)
                if isinstance(result, Failure) and result.is_out_of_memory and repr(job) not in self.repeated:
                    self.repeated.add(repr(job))
                    self.out_of_memory.append(job)
                else:
                    yield job, result
            else:
                self.ready.append((worker, job))

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs, self.lock_folder.name))
        with mock.patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS=str(COMPILE_THREADS)):
            process.start()
        theirs.close()
        self.workers.append(_Worker(process, ours))
        return self.workers[-1]

    def _end(self, worker: _Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
        self.ready = collections.deque(r for r in self.ready if r[0] is not worker)
        worker.connection.close()  # which ends the process
        self.ended.append(worker.process)


def _with_seconds(measure: Callable[[], Row], seconds: float) -> Row:
    return {**measure(), "prepared_s": seconds}


def _work(connection: Connection, lock_folder: str) -> None:
    """The loop of a worker process: prepares jobs, keeps them, and measures each when it is told to."""
    from fusebackend.bench.environment import default_device
    from fusebackend.bench.gpu_locks import GpuLocks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends it
    warnings.simplefilter("ignore")  # Inductor's advice on the models
    sys.stdout = sys.stderr
    locks = GpuLocks(lock_folder)
    prepared: dict[str, Callable[[], Row]] = {}
    while True:
        try:
            command, job = connection.recv()
        except EOFError:
            return
        began = time.perf_counter()
        if command == "prepare":
            with locks.preparing():
                result = attempt(job.prepare, default_device())
            if not isinstance(result, Failure):
                prepared[repr(job)] = functools.partial(_with_seconds, result, round(time.perf_counter() - began, 1))
                result = None
            gc.collect()
            torch.cuda.empty_cache()
        else:
            with locks.measuring():
                result = attempt(prepared.pop(repr(job)))
        connection.send(result)
