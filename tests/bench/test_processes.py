"""When the bench times what: calls in interleaved rounds; processes that compile in parallel and measure one at a time."""

import fcntl
import multiprocessing
import threading
import types
from pathlib import Path

import pytest
import torch

from fusebackend.bench import gpu_locks, process_pool
from fusebackend.bench.interleaved import interleaved_ms
from fusebackend.profitability import budget

CPU = torch.device("cpu")


def test_calls_are_timed_in_interleaved_rounds():
    order = []
    times = interleaved_ms({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, seconds=0.0, rounds=3)
    assert len(times["a"]) == len(times["b"]) == 3
    runs = [x for x, y in zip(order, [*order[1:], None]) if x != y]
    assert runs == list("abababab")  # warm-up, calibration, then a b, b a, a b


def test_what_is_timed_in_a_round_draws_the_same_random_numbers(monkeypatch):
    monkeypatch.setattr("fusebackend.bench.interleaved._entry_ms", lambda call, repeats, device: call() or 300.0)
    drawn = {"a": [], "b": []}
    interleaved_ms({name: lambda to=to: to.append(torch.rand(())) for name, to in drawn.items()}, CPU, seconds=0.0, rounds=3)
    assert torch.equal(torch.stack(drawn["a"][-3:]), torch.stack(drawn["b"][-3:]))
    assert len(set(map(float, drawn["a"][-3:]))) == 3


class Answer:
    """A job for worker processes, which import it from here."""

    def __init__(self, what, tried=None):
        self.what, self.tried = what, tried

    names = property(lambda self: {"what": self.what})
    weight = property(lambda self: self.what == "heavy")

    def __repr__(self):
        return self.what

    def prepare(self, device):
        if self.what == "fails":
            raise ValueError("as it was told to")
        if self.what == "dies":
            import os

            os._exit(3)
        if self.what == "large" or (self.what == "crowded" and not Path(self.tried).exists()):
            if self.tried:
                Path(self.tried).touch()
            raise torch.OutOfMemoryError if self.what == "large" else RuntimeError("CUDA error: out of memory")
        return lambda: {"measured": self.what}


def test_a_worker_process_measures_what_it_prepared_after_all_is_compiled():
    jobs = [Answer(what) for what in ("light", "fails", "heavy")]
    found = [(job.what, row) for job, row in process_pool.ProcessPool(jobs, False, workers=1).run()]
    assert [name for name, _ in found] == ["fails", "heavy", "light"]
    assert str(found[0][1]) == "ValueError: as it was told to"
    assert [row["measured"] for _, row in found[1:]] == ["heavy", "light"] and all(row["prepared_s"] >= 0 for _, row in found[1:])


@pytest.fixture
def imported_processes(monkeypatch):
    """Worker processes are copies of one that has imported all they need; spawned ones would each import it anew, in seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([process_pool.__name__, __name__])
    monkeypatch.setattr(process_pool.multiprocessing, "get_context", lambda method: context)


@pytest.mark.parametrize("process_per_job", [True, False])
def test_a_job_that_ran_out_of_memory_is_repeated_after_the_others(process_per_job, tmp_path, imported_processes):
    jobs = [Answer("crowded", str(tmp_path / "tried")), Answer("light"), Answer("large")]
    found = [(job.what, row) for job, row in process_pool.ProcessPool(jobs, process_per_job, workers=2).run()]
    names, rows = [what for what, _ in found], dict(found)
    assert names[0] == "light" and sorted(names[1:]) == ["crowded", "large"]
    assert rows["light"]["measured"] == "light" and rows["crowded"]["measured"] == "crowded"
    assert rows["large"].kind == "OutOfMemoryError", "it does not fit by itself either"


def test_a_worker_process_that_dies_costs_its_own_job_only():
    ((job, row),) = process_pool.ProcessPool([Answer("dies")], True, workers=1).run()
    assert str(row) == "the worker process ended: exit code 3"


def others_may(path, how):
    with open(path) as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_lock_is_taken_exclusively_within_a_shared_hold_and_released(tmp_path):
    path = tmp_path / "lock"
    lock = gpu_locks._FileLock(path)
    with lock.hold(exclusive=False):
        assert others_may(path, fcntl.LOCK_SH) and not others_may(path, fcntl.LOCK_EX)
        with lock.hold(exclusive=True):  # autotuning at the first call of a kernel
            assert not others_may(path, fcntl.LOCK_SH)
            with lock.hold(exclusive=False):
                assert not others_may(path, fcntl.LOCK_SH)
        assert others_may(path, fcntl.LOCK_SH) and not others_may(path, fcntl.LOCK_EX)
    assert others_may(path, fcntl.LOCK_EX)


def test_waiting_for_a_lock_costs_a_compile_no_share_of_its_timing(tmp_path):
    path, spent = tmp_path / "lock", budget.Budget(60.0)
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        with spent.spending(), gpu_locks._FileLock(path).hold(exclusive=False):
            assert others_may(path, fcntl.LOCK_SH), "it waited"
        release.join()
    assert 0 <= spent.spent < 0.25


def test_measuring_excludes_other_processes_and_running_a_graph_does_not(tmp_path, monkeypatch):
    taken = []

    def run(graph, inputs):
        taken.append([others_may(tmp_path / name, fcntl.LOCK_EX) for name in ("measuring", "timing")])

    monkeypatch.setattr(gpu_locks.CompiledFxGraph, "__call__", run)
    monkeypatch.setattr(gpu_locks.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_locks.timer, "times_ms", lambda: taken.append(others_may(tmp_path / "timing", fcntl.LOCK_SH)))
    locks, graph = gpu_locks.GpuLocks(tmp_path), types.SimpleNamespace()
    with locks.preparing():
        kept = gpu_locks.CompiledFxGraph.__call__
        kept(graph, [])
        kept(graph, [])
        gpu_locks.timer.times_ms()
    kept(graph, [])
    assert taken == [[False, True], [False, False], False, [True, True]]
    with locks.measuring():
        assert not others_may(tmp_path / "measuring", fcntl.LOCK_SH)
