"""Several ranks: every one has the peer's losses, and the same substitutions. On GPUs: see ranks.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusebackend.native import loader

RANKS = Path(__file__).with_name("ranks.py")


pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")


def run_two_ranks(*arguments):
    """Both ranks' exit statuses and what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, (str(RANKS.parent), os.environ.get("PYTHONPATH"))))}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs


def test_two_processes_train_alike_under_ddp_fsdp2_and_tensor_parallelism():
    statuses, outputs = run_two_ranks(str(RANKS))
    assert statuses == [0, 0], outputs
    lines = outputs[0][0].splitlines()
    for kind in ("ddp", "fsdp2", "tensor_parallel"):
        (line,) = (line for line in lines if line.startswith(f"{kind}: "))
        assert "alike on every rank" in line and "causal_conv1d_backward" in line


TIMING = """
import os, sys
import torch, torch.distributed as dist
sys.path.insert(0, os.environ["TESTS_OF_THE_GATE"])
for name in ("FUSEBACKEND_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
    os.environ[name] = os.path.join(os.environ["DISKS"], name + os.environ["RANK"])
from slow_product import compiled
from timed_patterns import Open
import fusebackend, ranks
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.default_timing import DefaultTiming

dist.init_process_group("gloo")
rank, is_open, room_to_call = dist.get_rank(), DefaultTiming.is_open, DefaultTiming._room_to_call
DefaultTiming.is_open = lambda self, _, estimate: is_open(self, torch.device("cuda"), estimate)
DefaultTiming._room_to_call = lambda self, _, estimate: room_to_call(self, torch.device("cuda"), estimate)
Budget.why_default_spent = lambda self, *what: "there is none" if "compiling" in what or rank != {with_time} else None
fusebackend.register(Open(0.0, (30e3, 5e3, 60e3), (40e3, 30e3, 50e3)))
if rank == 1:
    dist.barrier()  # rank 0 asks first
x = torch.randn(64)
torch.testing.assert_close(compiled(torch.sin, "auto", ["test_open"])(x), x.sin())
found = fusebackend.last_report()
print(found.counts(), *[v.why for v in found.verdicts], *[r.reason for r in found.rejections], flush=True)
if rank == 0:
    dist.barrier()
dist.barrier()
ranks.leave()
"""


@pytest.mark.parametrize("with_time", [0, 1])
def test_what_the_first_rank_times_by_default_decides_on_all(with_time, tmp_path, monkeypatch):
    """The other has no time left, and a disk of its own; where the first has none, nothing is timed on either."""
    built = loader.load().path
    if built is not None:
        monkeypatch.setenv("FUSEBACKEND_LIBRARY", str(built.parent))
    monkeypatch.setenv("TESTS_OF_THE_GATE", str(RANKS.parents[1] / "profitability"))
    monkeypatch.setenv("DISKS", str(tmp_path))
    statuses, outputs = run_two_ranks("-c", TIMING.format(with_time=with_time))
    assert statuses == [0, 0], outputs
    zero, one = (out.strip().splitlines()[-1] for out, _ in outputs)
    if with_time == 0:
        assert zero.startswith("{'test_open': 1} measured") and one == f"{zero}, by rank 0"
    else:
        assert zero == one and zero.startswith("{} ") and "there is none" in zero


BUSY = """
import ctypes, torch, torch.distributed as dist
import ranks

dist.init_process_group("gloo")
ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.distributed_c10d._get_default_group()))  # as torch keeps it after FSDP2
dist.barrier()
for _ in range(3000):
    x = torch.ones(4)
    x.has_a_python_object = True
    dist.all_reduce(x, async_op=True)
ranks.leave()
"""


def test_a_rank_ends_well_while_threads_of_gloo_still_drop_tensors():
    """Without ``leave`` two of three such ranks end in "terminate called without an active exception"."""
    statuses, outputs = run_two_ranks("-c", BUSY)
    assert statuses == [0, 0], outputs
