"""Fixtures of all families' tests."""

import pytest
import torch

from fusebackend.native import cache, loader


@pytest.fixture
def kernels_for_every_device(monkeypatch):
    """As if the library had code for every device: what is matched and estimated is tested where there is no GPU."""
    monkeypatch.setattr(loader.Native, "why_not", lambda self, device, *operators: None)


@pytest.fixture
def on_each_device(device):
    """Tensors are made on each device in turn, where the library has code for it."""
    reason = loader.load().why_not(device)
    if reason:
        pytest.skip(reason)
    with torch.device(device):
        yield


@pytest.fixture
def large_memory():
    """60 GiB of GPU memory: room for tensors of more than 2^31 elements. What PyTorch keeps of other tests is given back. One test at a
    time, among the processes that share a GPU."""
    with cache.lock("large_memory"):
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < 60 << 30:
            pytest.skip("needs 60 GiB of GPU memory")
        yield
        torch.cuda.empty_cache()
