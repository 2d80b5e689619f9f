"""Several ranks: every one has the peer's losses, and the same substitutions. On GPUs: see ranks.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
