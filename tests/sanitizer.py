"""compute-sanitizer over every CUDA kernel: ``python tests/sanitizer.py`` (a GPU, compute-sanitizer and nvcc are needed).

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
from collections.abc import Callable
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FAMILIES: dict[str, Callable[[], None]] = {}

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


def family(function: Callable[[], None]) -> Callable[[], None]:
    FAMILIES[function.__name__] = function
    return function


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


@family
def tile() -> None:
    """Rows, tiles and boxes; every element size; two and three operands, one or both of them staged; slices."""
    import torch

    ops = torch.ops.fusebackend

    def define(name: str, schema: str, fake: Callable) -> None:
        from fusebackend.native import ops as operators

        if not hasattr(ops, name):
            operators.define(name + schema, fake=fake)

    define("permute_copy", "(Tensor x, int[] order) -> Tensor", lambda x, order: torch.empty_permuted(x.shape, order))

    def copy(shape, permutation, dtype, start=0):
        x = random(shape, dtype)
        moved = x.cuda()[..., start:].permute(permutation)
        out = ops.permute_copy(moved, list(range(len(shape))))
        assert torch.equal(out.cpu(), x[..., start:].permute(permutation))

    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128):
        random_ = torch.complex128 if dtype == torch.complex128 else dtype
        for shape, permutation in [
            ((130, 200), (1, 0)),
            ((3, 128, 256), (0, 2, 1)),
            ((5, 33, 65), (2, 1, 0)),
            ((40, 3, 128), (0, 2, 1)),
            ((20, 30, 33), (1, 0, 2)),
            ((6, 10, 512), (1, 0, 2)),
            ((64, 64, 4), (1, 0, 2)),
            ((5, 7, 9, 11), (3, 1, 2, 0)),
        ]:
            if random_.is_complex:
                x = torch.complex(torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64))
                assert torch.equal(ops.permute_copy(x.cuda().permute(permutation), list(range(len(shape)))).cpu(), x.permute(permutation))
            else:
                copy(shape, permutation, dtype)
                copy(shape, permutation, dtype, start=1)

    def add(x, y, alpha, order):
        out = ops.transpose_add(x, y, alpha, int(alpha), order)
        close(out, x.cpu().double() + alpha * y.cpu().double(), tolerance(x.dtype))

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x, y = random((200, 130), dtype).cuda(), random((130, 200), dtype).cuda()
        add(x.t(), y, 1.0, [0, 1])
        add(y, x.t(), 2.0, [0, 1])
        add(x.t(), random((200, 130), dtype).cuda().t(), 1.0, [0, 1])
        add(x[1:, 3:].t(), random((127, 199), dtype).cuda(), 0.5, [0, 1])
        add(random((100, 3), dtype).cuda().t(), random((3, 100), dtype).cuda(), 1.0, [0, 1])
        add(random((4, 64, 96), dtype).cuda().transpose(1, 2), random((96, 64), dtype).cuda(), 1.0, [0, 1, 2])
        add(x.t(), random((1, 200), dtype).cuda().expand(130, 200), 1.0, [0, 1])


@family
def accumulate() -> None:
    """The routes of csrc/index_add/launch.h, each with what it absorbs; into self, onto self, onto zeros."""
    import torch

    from fusebackend.patterns.index_add import ops as family

    ops = torch.ops.fusebackend

    def check(shape, dim, n, dtype, *, precise=False, det=False, weighted=False, gathered=False, hot=False, bounds=family.STRICT):
        self, rows = random(shape, dtype), shape[dim]
        source_shape = [*shape[:dim], 40 if gathered else n, *shape[dim + 1 :]]
        source = random(source_shape, dtype)
        index = torch.randint(-rows if bounds == family.WRAP else 0, rows + (bounds == family.DROP), (n,))
        if hot:
            index[: n // 2] = rows // 3
        weight = random((n,), dtype) if weighted else None
        source_index = torch.randint(0, 40, (n,)) if gathered else None
        alpha = 2.0 if dtype.is_floating_point and not weighted else 1.0
        cuda = [None if t is None else t.cuda() for t in (index, source, weight, source_index)]
        options = (dim, *cuda, alpha, None, bounds, precise, det)
        exact = family.reference(self, dim, index, source, weight, source_index, alpha, None, bounds)
        slack = 4 * tolerance(dtype)
        target = self.cuda()
        ops.index_add_(target, *options)
        close(target, exact, slack)
        close(ops.index_add(self.cuda(), *options), exact, slack)
        zeros = family.reference(torch.zeros_like(self), dim, index, source, weight, source_index, alpha, None, bounds)
        close(ops.index_add_zeros(rows, *options), zeros, slack)
        if n:  # the same by a plan, which several sums may share
            plan = ops.index_plan(cuda[0], rows, None, bounds, cuda[3], 40 if gathered else 0)
            wanted = family.reference_plan(index, rows, None, bounds, source_index, 40 if gathered else 0)
            assert torch.equal(plan.cpu(), wanted)
            close(ops.index_add_zeros(rows, *options, plan), zeros, slack)

    half, single = torch.bfloat16, torch.float32
    for dtype in (single, torch.float64, torch.float16, half, torch.int64, torch.int32, torch.int16, torch.uint8):
        check((300, 64), 0, 200, dtype)  # reductions straight into out
        check((300, 7), 0, 200, dtype)
        check((1000,), 0, 15, dtype)
        check((3, 50, 8), 1, 30, dtype, weighted=dtype.is_floating_point, gathered=True)
        check((200, 33), 0, 513, dtype, det=True)  # sorted
        check((200, 64), 0, 900, dtype, det=True)
        check((20, 1024), 0, 15, dtype)  # wide rows, as they are
        check((4, 256), 0, 2000, dtype, weighted=dtype.is_floating_point)  # few rows: sorted within a block
    for dtype in (single, half):
        check((300, 64), 0, 200, dtype, weighted=True, gathered=True)
        check((300, 64), 0, 200, dtype, bounds=family.WRAP)
        check((300, 64), 0, 200, dtype, bounds=family.DROP)
        check((5,), 0, 12000, dtype)  # a table of all rows in shared memory
        check((7, 64), 0, 16000, dtype)
        check((7, 64), 0, 16000, dtype, det=True)
        check((20, 30, 33), 1, 700, dtype, det=True)
        check((4, 20000), 0, 20, dtype, det=True)  # owned columns
        check((300, 64), 0, 20, dtype, det=True)
    check((100, 64), 0, 2000, half)  # an fp32 copy, rounded once
    check((100, 33), 0, 500, half, precise=True)
    check((2, 600000), 0, 3, single)
    check((1000, 64), 0, 40000, single)
    check((300, 1024), 0, 16500, half, precise=True, gathered=True)  # buckets of rows
    for hot in (False, True):
        check((3000, 1024), 0, 25000, single, gathered=True, hot=hot)
    check((50, 8), 0, 0, single)


@family
def causal_conv1d() -> None:
    """Few taps in both memory orders, any taps, long ones on tensor cores, and by FFT; forward and backward."""
    import torch

    ops = torch.ops.fusebackend

    def reference(x, weight, bias, left, silu):
        n = x.shape[2] + weight.shape[2]
        spectrum = torch.fft.rfft(x, n) * torch.fft.rfft(weight[:, 0].flip(-1), n)
        full = torch.fft.irfft(spectrum, n)  # by FFT, for the thousands of taps
        out = full[..., weight.shape[2] - 1 - left :][..., : x.shape[2]] + bias[:, None] + 0.25
        return torch.nn.functional.silu(out) if silu else out

    def check(batch, channels, length, taps, dtype, *, channels_last=False, left=None, silu=False):
        def rows():
            shape = (batch, length, channels) if channels_last else (batch, channels, length)
            made = random(shape, dtype).cuda()
            return made.transpose(1, 2) if channels_last else made

        x, grad = rows(), rows()
        weight, bias = random((channels, 1, taps), dtype).div_(taps**0.5).cuda(), random((channels,), dtype).cuda()
        left = taps - 1 if left is None else left
        right = taps - 1 - left
        out = ops.causal_conv1d(x, weight, bias, left, right, 0.25, silu, channels_last)
        if channels_last:  # the other memory order, too
            turned = ops.causal_conv1d(x, weight, bias, left, right, 0.25, silu, False)
            close(turned, out.cpu().double(), tolerance(dtype))
        gradients = list(ops.causal_conv1d_backward(grad, x, weight, bias, left, 0.25, silu, channels_last, True, True, True))
        if channels_last:
            gradients += ops.causal_conv1d_backward(grad.contiguous(), x, weight, bias, left, 0.25, silu, False, True, True, True)
        leaves = [t.cpu().double().contiguous().requires_grad_() for t in (x, weight, bias)]
        exact = reference(*leaves, left, silu)
        close(out, exact.detach(), tolerance(dtype))
        for got, want in zip(gradients, 2 * torch.autograd.grad(exact, leaves, grad.cpu().double())):
            close(got, want, 2 * tolerance(dtype))

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for channels_last in (False, True):
            for channels, length, taps in ((16, 129, 4), (5, 64, 4), (72, 200, 4), (8, 200, 3), (1, 40, 2)):
                check(2, channels, length, taps, dtype, channels_last=channels_last, silu=taps == 4)
            check(2, 4, 100, 31, dtype, channels_last=channels_last)
        check(2, 3, 100, 8, dtype, left=3)
        for batch, length, taps in ((2, 129, 129), (4, 100, 100), (9, 300, 300), (17, 64, 33), (3, 700, 31), (2, 700, 640)):
            check(batch, 2, length, taps, dtype, silu=batch == 4)
        check(2, 2, 4096, 4096, dtype)
        check(2, 2, 8192, 8192, dtype)


@family
def matmul() -> None:
    """Whole tiles, tiles in parts, in shares; every majorness; batches; what is added; planes that are shared."""
    import torch

    from fusebackend.patterns.fp32_matmul import match as family

    if torch.cuda.get_device_capability() != (9, 0) or family.unavailable(torch.device("cuda", 0)):
        return
    ops = torch.ops.fusebackend

    def operand(shape, order):
        *batch, rows, columns = shape
        if order == "rows":
            return torch.randn(*batch, rows, columns).cuda()
        if order == "columns":
            return torch.randn(*batch, columns, rows).cuda().mT
        return torch.randn(*batch, rows + 1, columns + 3).cuda()[..., 1:, 3:]

    def check(m, n, k, orders=("rows", "rows"), batch=(), d=None, alpha=1.0, beta=0.0):
        a, b = operand((*batch, m, k), orders[0]), operand((*batch, k, n), orders[1])
        exact = alpha * (a.cpu().double() @ b.cpu().double()) + (0 if d is None else beta * d.double())
        added = None if d is None else d.cuda()
        close(ops.matmul(a, b, added, alpha, beta), exact, 1e-6)
        for kernel in ("mma", "ffma"):
            close(ops.matmul(a, b, added, alpha, beta, None, -1, None, -1, kernel), exact, 1e-6)
        a_planes, b_planes = ops.matmul_planes(a, -1), ops.matmul_planes(b, -2)
        close(ops.matmul(a, b, added, alpha, beta, a_planes, -1, b_planes, -2), exact, 1e-6)

    for orders in (("rows", "rows"), ("columns", "rows"), ("rows", "columns"), ("slice", "columns")):
        check(129, 257, 96, orders)
    check(3, 5, 7)
    check(128, 256, 32)
    check(127, 255, 1234)
    check(384, 512, 700, d=torch.randn(512), alpha=1.5, beta=0.5)
    check(100, 90, 130, batch=(3,), d=torch.randn(3, 100, 90), beta=1.0)
    check(2304, 2304, 64)  # more tiles than multiprocessors
    check(64, 64, 0)


def worker(name: str, recorded: Path | None) -> None:
    """Runs a family; with ``recorded``, under torch's profiler, and writes the names of what was launched."""
    import torch

    from fusebackend.native import loader
    from fusebackend.rewriting import registry

    registry.all_patterns()  # define the operators
    reason = loader.load().why_not(torch.device("cuda", 0))
    if reason:
        sys.exit(f"{name}: {reason}")
    torch.manual_seed(0)
    if recorded is None:
        FAMILIES[name]()
        torch.cuda.synchronize()
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        FAMILIES[name]()
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
    parser.add_argument("--family", action="append", help=f"only this one of {', '.join(FAMILIES)} (may be repeated)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one (may be repeated)")
    parser.add_argument("--logs", type=Path, help="folder for the tools' output")
    parser.add_argument("--timeout", type=int, default=110, help="seconds for all")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(chosen.worker, chosen.record)
        return 0

    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    families, tools = chosen.family or list(FAMILIES), chosen.tool or TOOLS
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

        me = [sys.executable, __file__]
        watched = [sanitizer, "--error-exitcode", "99", "--print-limit", "20", "--tool"]
        for name in families:
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
