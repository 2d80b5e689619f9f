"""The demo's sequence. That it trains and compares is tested with the command line."""

import subprocess
import sys

import pytest

from fusebackend.tools import demo


def test_kernels_are_built_before_a_compile_is_timed(monkeypatch):
    events = []

    def stop(self, tokens):
        events.append("step")
        raise StopIteration

    monkeypatch.setattr(demo.loader, "load", lambda: events.append("load"))
    monkeypatch.setattr(demo.Trainer, "step", stop)
    with pytest.raises(StopIteration):
        demo.run(2)
    assert events == ["load", "step"]


def test_batches_are_the_same_at_every_call_and_hold_excerpts():
    text = bytes(range(200))
    first, second = (demo.batches(text, batch=3, time_steps=8, steps=2, device="cpu") for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second)) and len(first) == 2
    assert all(b.shape == (3, 9) and bool((b.diff() == 1).all()) for b in first)


def test_the_command_line_does_not_warn_where_numpy_is_not_installed():
    script = (
        "import runpy, sys; sys.modules['numpy'] = None; sys.argv[1:] = ['patterns']; runpy.run_module('fusebackend', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "NumPy" not in done.stderr
