"""Shared fixtures. Most tests run the rewritten graph without code generation (``fuse.interpret``): seconds, not minutes."""

import contextlib
import gc
import os

# oneDNN's newer code generator for depthwise convolutions in 16 bits may loop for ever, depending on uninitialised memory: eager
# convolutions, with which results are compared, hung in it without any code of ours. This selects the older one. Read at torch's first
# call of oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# Test processes share the cores: threads that spin while they wait would take the time of the other process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# In each new cache Inductor tries with the compiler which vector instructions work: 15 s, and many tests have a cache of their own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import stand_in_calibrations
import torch
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

import fusebackend
from fusebackend.native import loader
from fusebackend.profitability import calibration
from fusebackend.rewriting.registry import all_patterns


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def loaded():
    """All operators are defined and have their kernels, whichever test comes first."""
    loader.load()
    all_patterns()


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
def interpreted():
    """Compiles a function with ``backend="fuse"``, without code generation, every match applied."""

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
        fusebackend.unregister(name)


@pytest.fixture
def starved():
    """Leaves this process so many bytes of the GPU, and up to some tens of MB more, since the allocator's total is not quite the device's:
    what other tests left free within blocks that are in use is taken, too."""

    @contextlib.contextmanager
    def leave(free_bytes=4 << 20):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free_bytes) / total)
        try:
            yield
        finally:
            taken.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)

    return leave


@pytest.fixture
def calibrated(monkeypatch):
    """Installs a calibration by which every replacement takes so many microseconds, and what Inductor does ``THEIRS_US`` a kernel; or none.
    What is estimated then depends on no machine."""

    def install(ours_us):
        found = None if ours_us is None else stand_in_calibrations.stand_in(ours_us)
        monkeypatch.setattr(calibration, "of_device", lambda device: found)

    return install


@pytest.fixture
def laid_out(monkeypatch):
    """Whether Inductor laid out the convolutions of each graph that it compiled, by the rules that it has for GPUs."""
    found = []
    run = GraphLowering.run

    def noting(self, *args):
        found.append(self.layout_opt)
        return run(self, *args)

    monkeypatch.setattr(GraphLowering, "run", noting)
    with torch.backends.mkldnn.flags(enabled=False), inductor_config.patch(force_disable_caches=True):
        yield found
