"""Fixtures of the tests of the gate and of races."""

import pytest
import torch
from slow_product import Replace, mm, slow_mm

from fusebackend.native import loader
from fusebackend.profitability import default_timing, region
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.default_timing import DefaultTiming


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


@pytest.fixture
def timed(own_cache, monkeypatch):
    """As on a GPU. Gives the subjects of what was timed."""
    subjects, time_replacement = [], default_timing.time_replacement

    def counted(region, subject):
        subjects.append(subject)
        return time_replacement(region, subject)

    is_open = DefaultTiming.is_open
    on_a_gpu = torch.device("cuda")
    monkeypatch.setattr(DefaultTiming, "is_open", lambda self, _, estimate: is_open(self, on_a_gpu, estimate))
    room_to_call = DefaultTiming._room_to_call
    monkeypatch.setattr(DefaultTiming, "_room_to_call", lambda self, _, estimate: room_to_call(self, on_a_gpu, estimate))
    monkeypatch.setattr(Budget, "why_default_spent", lambda self, *what: "it is too short" if "compiling" in what else None)
    monkeypatch.setattr(default_timing, "time_replacement", counted)
    return subjects
