"""Fixtures of all families' tests."""

import pytest
import torch

from fusebackend.native import loader


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
