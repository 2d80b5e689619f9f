"""Shared fixtures. Most tests run the rewritten graph without code generation (``fuse.interpret``): seconds, not minutes."""

import os

# oneDNN's newer code generator for depthwise convolutions in 16 bits may never end, by what lies in memory: eager convolutions, which
# results are compared with, hung in it with nothing of ours called. This keeps to the older one; it is read when torch first calls oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# Two workers share what cores there are: threads that spin while they wait for one another take the time of the other's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# In each new cache Inductor asks the compiler for all vectors that the processor has: 15 s, and many tests have a cache of their own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch

import fusebackend
from fusebackend.native import loader
from fusebackend.rewriting import registry


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def loaded():
    """Operators have their kernels, whichever test comes first."""
    loader.load()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    fusebackend.backend.fuse.reset()  # which Dynamo calls only for what it compiled itself
    torch.manual_seed(0)
    yield


@pytest.fixture
def library():
    """Skips where the native library can't be built, with the reason."""
    reason = loader.load().why_not(torch.device("cpu"))
    if reason:
        pytest.skip(reason)


@pytest.fixture
def interpreted(monkeypatch):
    """Compiles a function with ``backend="fuse"``, without code generation, every match applied, also to a few bytes."""

    def compile_(fn, **kwargs):
        options = {"fuse.interpret": True, "fuse.gate": "off", **kwargs.pop("options", {})}
        return torch.compile(fn, backend="fuse", options=options, **kwargs)

    return compile_


@pytest.fixture
def temporary_pattern():
    """Registers patterns for one test."""
    names = []

    def add(pattern):
        names.append(pattern.name)
        return fusebackend.register(pattern)

    yield add
    for name in names:
        registry._patterns.pop(name)
