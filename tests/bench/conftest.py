"""Fixtures of the bench's tests."""

import types

import pytest
from bench_examples import QUICK_WAYS

from fusebackend.bench import case_lists, commands, kernels


@pytest.fixture
def family(monkeypatch):
    """Makes the bench know one family, called tiny, with the cases given, and only quick ways."""

    def use(*cases, drawn=None):
        bench = types.SimpleNamespace(cases=lambda: list(cases), random_cases=drawn)
        for module in (case_lists, commands, kernels):
            monkeypatch.setattr(module, "families", lambda: {"tiny": types.SimpleNamespace(bench=bench)})
        monkeypatch.setattr(kernels, "WAYS", QUICK_WAYS)

    return use
