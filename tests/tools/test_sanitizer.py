"""The parts of the compute-sanitizer runs that need no GPU."""

import subprocess
import sys

import pytest
import torch

from fusebackend.native import build
from fusebackend.tools.sanitizer import close, tolerance
from fusebackend.tools.sanitizer.runner import PLANTED_FAULTS, TOOLS, declared_kernels


def test_each_tool_has_a_planted_fault():
    assert declared_kernels(PLANTED_FAULTS.parent) == set(TOOLS)


def test_kernels_are_found_however_they_are_declared(tmp_path):
    (tmp_path / "a.cu").write_text(
        "__global__ void plain(int* p) {}\ntemplate <int N>\n__global__ void __launch_bounds__(f(N), g(h(1))) bounded(int) {}"
    )
    (tmp_path / "b.cuh").write_text("__global__ __launch_bounds__(256) void bounds_first() {}\n__device__ void not_a_kernel() {}")
    assert declared_kernels(tmp_path) == {"plain", "bounded", "bounds_first"}
    assert declared_kernels(build.sources_root())


def test_results_are_compared_by_shape_and_relative_norm():
    exact = torch.randn(8, 8, dtype=torch.float64)
    close(exact.float(), exact, tolerance(torch.float32))
    with pytest.raises(AssertionError, match="relative error"):
        close(exact.float() * 1.001, exact, tolerance(torch.float32))
    with pytest.raises(AssertionError):
        close(exact[:4], exact, tolerance(torch.float32))


def test_the_runner_says_what_it_takes():
    done = subprocess.run([sys.executable, "-m", "fusebackend.tools.sanitizer", "--family", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "index_add" in done.stderr
