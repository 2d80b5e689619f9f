"""Runs compute-sanitizer's tools over every CUDA kernel. Needs a GPU, compute-sanitizer and nvcc.

memcheck, racecheck, initcheck and synccheck each watch each family in a process of its own, all in parallel. The processes use
no caching allocator, so that every allocation is one of the driver's, and create their inputs on the CPU.

Two controls make sure that a clean result means something: an unwatched run of each family records the kernels that it
launches, which together must be every ``__global__`` function in csrc; and each tool must find the fault that is planted for it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fusebackend.native import build, loader
from fusebackend.native.ninja_build import check_nvcc_arguments
from fusebackend.rewriting.registry import families
from fusebackend.tools.command_line import Parser, exit_status, whole
from fusebackend.tools.object_reference import CommandError
from fusebackend.tools.sanitizer import KnownReport

PLANTED_FAULTS = Path(__file__).with_name("planted_faults.cu")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FAULT_FOUND = 99  # exit status of compute-sanitizer
_LINES_SHOWN = 60  # of the output of a run that failed


@dataclasses.dataclass(frozen=True)
class Run:
    """A process and what is expected of it."""

    name: str
    process: subprocess.Popen
    log: Path
    started: float
    expected_status: int
    known: tuple[KnownReport, ...] = ()

    @classmethod
    def start(cls, name: str, command: list[str], logs: Path, expected_status: int = 0, known: tuple[KnownReport, ...] = ()) -> Run:
        log = logs / f"{name}.log"
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        return cls(name, process, log, time.monotonic(), expected_status, known)

    def report(self, timed_out: bool) -> bool:
        """Prints what a process that ended has found. Returns whether that was expected."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = known_reports(lines, self.known) if self.process.returncode == _FAULT_FOUND != self.expected_status else []
        expected = self.process.returncode == self.expected_status or bool(found)
        summary = "timed out" if timed_out else next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "")
        verdict = "FAIL" if not expected else "KNOWN" if found else "ok"
        print(f"{verdict:5} {self.name:28} {time.monotonic() - self.started:5.1f} s  {summary}", flush=True)
        for known in dict.fromkeys(found):
            print(f"     {found.count(known)} reports of {known.kernel}, known: {known.reason}")
        if not expected:
            print("\n".join(lines[-_LINES_SHOWN:]))
        return expected


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if no tool found a fault in a kernel, all kernels were launched, and each tool found its planted fault; otherwise see
    :mod:`fusebackend.tools.command_line`."""
    return exit_status(lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    parser = Parser(prog="python -m fusebackend.tools.sanitizer", description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", choices=list(families()), help="run only this family (may be repeated)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="run only this tool (may be repeated)")
    parser.add_argument("--logs", type=Path, help="folder for the output of the runs")
    parser.add_argument("--timeout", type=whole(1), default=110, help="seconds for all runs together (default 110)")
    chosen = parser.parse_args(arguments)
    nvcc, sanitizer = _find_tools()
    if not torch.cuda.is_available():
        raise CommandError("torch sees no GPU: the sanitizer needs one")
    loader.load()  # builds the library if it is missing: one of the runs would time out
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        logs = chosen.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        planted = Path(scratch) / "planted_faults"
        check_nvcc_arguments(str(planted), str(PLANTED_FAULTS))
        subprocess.run([*shlex.split(nvcc), "-arch=native", "-o", str(planted), str(PLANTED_FAULTS)], check=True)
        watched = [sanitizer, "--error-exitcode", str(_FAULT_FOUND), "--print-limit", "20", "--tool"]
        worker = [sys.executable, "-m", "fusebackend.tools.sanitizer.worker"]
        runs = []
        for name in chosen.family or families():
            script = families()[name].sanitizer
            for tool in chosen.tool or TOOLS:
                known = getattr(script, "KNOWN_REPORTS", ()) if tool == "racecheck" else ()
                blind = tool == "initcheck" and getattr(script, "STORES_BY_BULK_COPIES", False)
                options = ["--check-api-memory-access", "no"] if blind else []
                runs.append(Run.start(f"{tool}-{name}", [*watched, tool, *options, *worker, name], logs, known=known))
            runs.append(Run.start(f"launched-{name}", [*worker, name, "--record", str(logs / f"{name}.txt")], logs))
        for tool in chosen.tool or TOOLS:
            runs.append(Run.start(f"planted-{tool}", [*watched, tool, str(planted), tool], logs, _FAULT_FOUND))
        failed = _wait(runs, began + chosen.timeout)
        launched = "\n".join(p.read_text() for p in logs.glob("*.txt"))
    declared = declared_kernels(build.sources_root())
    missing = set() if chosen.family else {k for k in declared if not re.search(rf"\b{k}\b", launched)}
    print(f"kernels in csrc: {len(declared)}; not launched: {', '.join(sorted(missing)) or 'none'}")
    print(f"{len(runs) - len(failed)} of {len(runs)} runs as expected in {time.monotonic() - began:.0f} s")
    return 1 if failed or missing else 0


def _find_tools() -> tuple[str, str]:
    """The paths of nvcc and compute-sanitizer."""
    toolkit = build.Toolchain.find()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(f"{toolkit.cuda_home}/bin/compute-sanitizer")
    if toolkit.nvcc is None or sanitizer is None:
        missing = "nvcc" if toolkit.nvcc is None else "compute-sanitizer"
        raise CommandError(f"no {missing} found: install the CUDA toolkit, or set CUDA_HOME")
    return toolkit.nvcc, sanitizer


def _wait(runs: list[Run], deadline: float) -> list[Run]:
    """Reports each run when it ends, and kills those that have not ended by ``deadline``. Returns those that failed."""
    failed, running = [], runs
    while running:
        timed_out = time.monotonic() > deadline
        ended = [run for run in running if timed_out or run.process.poll() is not None]
        for run in ended:
            killed = run.process.poll() is None
            if killed:
                run.process.kill()
                run.process.wait()
            if not run.report(killed):
                failed.append(run)
        running = [run for run in running if run not in ended]
        time.sleep(0.1)
    return failed


def known_reports(lines: list[str], known: Sequence[KnownReport]) -> list[KnownReport]:
    """Which known report each of racecheck's is; nothing if one is not, if not all were printed, or if the program itself failed."""
    if any(line.startswith("Traceback") or "Target application returned an error" in line for line in lines):
        return []
    reports: list[list[str]] = []
    for line in lines:
        if line.startswith("========= Error:") or line.startswith("========= Warning:"):
            reports.append([line])
        elif reports and "access at" in line:
            reports[-1].append(line)
    summaries = [re.search(r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, 0 warnings\)", line) for line in lines]
    counts = [int(summary[2]) for summary in summaries if summary]
    found = [next((k for k in known if k.covers(report)), None) for report in reports]
    return [k for k in found if k] if counts == [len(found)] and None not in found else []


def declared_kernels(sources: Path) -> set[str]:
    """The names of the ``__global__`` functions in the CUDA files of a folder."""
    balanced = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # up to three levels of parentheses
    declaration = re.compile(rf"__global__\s+(?:void\s+)?(?:__launch_bounds__{balanced}\s*)?(?:void\s+)?(\w+)\s*\(")
    return {name for path in sources.rglob("*.cu*") for name in declaration.findall(path.read_text())}
