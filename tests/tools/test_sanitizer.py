"""The parts of the compute-sanitizer runs that need no GPU."""

import subprocess
import sys

import pytest
import torch

from fusebackend.native import build
from fusebackend.rewriting.registry import families
from fusebackend.tools.sanitizer import KnownReport, close, tolerance
from fusebackend.tools.sanitizer.runner import PLANTED_FAULTS, TOOLS, declared_kernels, known_reports


def test_each_tool_has_a_planted_fault():
    assert declared_kernels(PLANTED_FAULTS.parent) == set(TOOLS)


def test_kernels_are_found_however_they_are_declared(tmp_path):
    (tmp_path / "a.cu").write_text(
        "__global__ void plain(int* p) {}\ntemplate <int N>\n__global__ void __launch_bounds__(f(N), g(h(1))) bounded(int) {}"
    )
    (tmp_path / "b.cuh").write_text("__global__ __launch_bounds__(256) void bounds_first() {}\n__device__ void not_a_kernel() {}")
    assert declared_kernels(tmp_path) == {"plain", "bounded", "bounds_first"}
    assert declared_kernels(build.sources_root())


RACE = """========= Error: Race reported between Write access at void family::copied<float, (int)64>(family::Arguments)+0x65d0
=========     and Read access at void family::copied<float, (int)64>(family::Arguments)+0x3e40 [256 hazards]
=========     and Read access at void family::copied<float, (int)64>(family::Arguments)+0x4d00 [128 hazards]
========= """
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


def test_known_reports_are_told_from_others():
    known = KnownReport("copied", "a reason")

    def found(*reports, shown=None, tail=""):
        shown = len(reports) if shown is None else shown
        return known_reports("\n".join([*reports, SUMMARY.format(shown, shown), tail]).splitlines(), [known])

    assert found(RACE) == [known] and found(RACE, RACE) == [known, known]
    assert found(RACE, RACE.replace("copied", "copied_too")) == []
    assert found(RACE.replace("Read access at void family::copied<", "Read access at void family::another<", 1)) == []
    assert found(RACE.replace("and Read", "and Write", 1)) == []
    assert found(RACE, shown=2) == []  # not all were printed
    assert found(RACE, tail="========= Target application returned an error") == []
    assert known_reports(RACE.splitlines(), [known]) == known_reports(SUMMARY.format(0, 0).splitlines(), [known]) == []


def test_known_reports_are_of_kernels_that_exist():
    kernels = declared_kernels(build.sources_root())
    reports = [known for family in families().values() for known in getattr(family.sanitizer, "KNOWN_REPORTS", ())]
    assert {known.kernel for known in reports} <= kernels


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
