"""compute-sanitizer over every CUDA kernel: ``python -m fusebackend.tools.sanitizer`` (a GPU, compute-sanitizer and nvcc are needed).

Each family calls its operators eagerly, at small shapes, so that every kernel is launched; memcheck, racecheck, initcheck
and synccheck each watch each family, all in parallel processes. Every allocation is one of the driver's (torch's cache is
off), inputs are made on the CPU and copied, and results are compared with the families' references in double precision.
Two controls: an unwatched run must have launched every ``__global__`` function in csrc, and each tool must find its fault
in a program that has one. Exit status 0: clean, complete, and the tools work.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

# One fault for each tool.
PLANTED = r"""
#include <cstdlib>
#include <cstring>
__global__ void memcheck(int* p) { p[64 + threadIdx.x] = 1; }
__global__ void racecheck(int* p) { __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; p[threadIdx.x] = s[63 - threadIdx.x]; }
__global__ void initcheck(int* p) { p[threadIdx.x] += 1; }
__global__ void synccheck(int* p) { if (threadIdx.x < 40) __syncthreads(); p[threadIdx.x] = 1; }
int main(int, char** argv) {
  int* p;
  cudaMalloc(&p, 64 * sizeof(int));
  if (!strcmp(argv[1], "memcheck")) memcheck<<<1, 64>>>(p);
  if (!strcmp(argv[1], "racecheck")) racecheck<<<1, 64>>>(p);
  if (!strcmp(argv[1], "initcheck")) initcheck<<<1, 64>>>(p);
  if (!strcmp(argv[1], "synccheck")) synccheck<<<1, 64>>>(p);
  return cudaDeviceSynchronize() != cudaSuccess;
}
"""


def close(found, exact, tolerance: float) -> None:
    """Norm-wise, against a reference in double precision."""
    found, exact = found.cpu().double(), exact.double()
    assert found.shape == exact.shape, (found.shape, exact.shape)
    error = (found - exact).norm() / exact.norm().clamp_min(1e-30)
    assert error <= tolerance, f"relative error {error:.1e}"


def tolerance(dtype) -> float:
    import torch

    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 0.0)


def random(shape, dtype):
    import torch

    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 100, shape).to(dtype)


def worker(name: str, recorded: Path | None) -> None:
    """Runs a family; with ``recorded``, under torch's profiler, and writes the names of what was launched."""
    import torch

    from fusebackend.native import loader
    from fusebackend.rewriting.registry import families

    launch = families()[name].sanitizer.launch_every_kernel
    reason = loader.load().why_not(torch.device("cuda", 0))
    if reason:
        sys.exit(f"{name}: {reason}")
    torch.manual_seed(0)
    if recorded is None:
        launch()
        torch.cuda.synchronize()
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        launch()
        torch.cuda.synchronize()
    recorded.write_text("\n".join(sorted({event.name for event in profiled.events()})))


def declared() -> set[str]:
    """The ``__global__`` functions of csrc."""
    from fusebackend.native import build

    sources = [p.read_text() for p in build.sources_root().rglob("*.cu*")]
    nested = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    pattern = rf"__global__\s+(?:void\s+)?(?:__launch_bounds__{nested}\s*)?(?:void\s+)?(\w+)\s*\("
    return {name for text in sources for name in re.findall(pattern, text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", help="only this one (may be repeated)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one (may be repeated)")
    parser.add_argument("--logs", type=Path, help="folder for the tools' output")
    parser.add_argument("--timeout", type=int, default=110, help="seconds for all")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(chosen.worker, chosen.record)
        return 0

    from fusebackend.rewriting.registry import families

    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    names, tools = chosen.family or list(families()), chosen.tool or TOOLS
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        logs = chosen.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        processes: dict[str, tuple[subprocess.Popen, Path, float]] = {}

        def start(name: str, command: list[str]) -> None:
            log = logs / f"{name}.log"
            with log.open("w") as stream:
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            processes[name] = process, log, time.monotonic()

        me = [sys.executable, "-m", __spec__.name]
        watched = [sanitizer, "--error-exitcode", "99", "--print-limit", "20", "--tool"]
        for name in names:
            for tool in tools:
                start(f"{tool}-{name}", [*watched, tool, *me, "--worker", name])
            start(f"launched-{name}", [*me, "--worker", name, "--record", str(logs / f"{name}.txt")])
        program = Path(scratch) / "planted"
        source = program.with_suffix(".cu")
        source.write_text(PLANTED)
        subprocess.run([nvcc, "-arch=native", "-o", str(program), str(source)], check=True)
        for tool in tools:
            start(f"planted-{tool}", [*watched, tool, str(program), tool])

        failed, finished = [], set()
        while len(finished) < len(processes):
            for name, (process, log, since) in processes.items():
                if name in finished:
                    continue
                late = time.monotonic() - began > chosen.timeout
                if process.poll() is None and not late:
                    continue
                if process.poll() is None:
                    process.kill()
                    process.wait()
                finished.add(name)
                text = log.read_text(errors="replace")
                right = process.returncode == (99 if name.startswith("planted") else 0)
                summary = next((line for line in reversed(text.splitlines()) if "SUMMARY" in line), "").strip("= ")
                print(
                    f"{'ok  ' if right else 'FAIL'} {name:28} {time.monotonic() - since:5.1f} s  {'too late' if late else summary}",
                    flush=True,
                )
                if not right:
                    failed.append(name)
                    print("\n".join(text.splitlines()[-60:]))
            time.sleep(0.1)
        launched = "\n".join(p.read_text() for p in logs.glob("*.txt"))
        missing = {k for k in declared() if not re.search(rf"\b{k}\b", launched)} if not chosen.family else set()
        print(f"kernels in csrc: {len(declared())}; launched by nobody: {', '.join(sorted(missing)) or 'none'}")
        print(f"{len(processes) - len(failed)} of {len(processes)} runs right in {time.monotonic() - began:.0f} s")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
