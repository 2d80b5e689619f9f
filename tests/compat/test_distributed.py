"""Several ranks: every one has the peer's losses, and the same substitutions. On GPUs: see ranks.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANKS = Path(__file__).with_name("ranks.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_two_processes_train_alike_under_ddp_fsdp2_and_tensor_parallelism():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common["CUDA_VISIBLE_DEVICES"] = ""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS)],
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
    assert all(rank.returncode == 0 for rank in ranks), outputs
    lines = outputs[0][0].splitlines()
    for kind in ("ddp", "fsdp2", "tensor_parallel"):
        (line,) = (line for line in lines if line.startswith(f"{kind}: "))
        assert "alike on every rank" in line and "causal_conv1d_backward" in line
