"""Fixtures of all families' tests."""

import pytest

from fusebackend.native import loader


@pytest.fixture
def kernels_for_every_device(monkeypatch):
    """As if the library had code for every device: what is matched and estimated is tested where there is no GPU."""
    monkeypatch.setattr(loader.Native, "why_not", lambda self, device, *operators: None)
