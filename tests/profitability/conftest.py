"""Fixtures of the tests of the gate and of races."""

import pytest
from slow_product import Replace, mm, slow_mm

from fusebackend.native import loader
from fusebackend.profitability import region


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    built = loader.load().path
    if built is not None:
        monkeypatch.setenv("FUSEBACKEND_LIBRARY", str(built.parent))
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "verdicts"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture
def the_long_way(monkeypatch, request):
    """Regions are compiled by Inductor although these are calls of libraries."""
    if "cuda" not in request.keywords:
        monkeypatch.setattr(region.Region, "is_calls", False)


@pytest.fixture
def slow(temporary_pattern):
    return temporary_pattern(Replace("test_slow", mm, slow_mm))


@pytest.fixture
def fast(temporary_pattern):
    return temporary_pattern(Replace("test_fast", slow_mm, mm))
