"""``python -m fusebackend bench``: every peer and ours, measured in one run.

``kernels`` times the cases that the families bring along (``bench_cases`` in their files) eagerly, with Inductor static,
dynamic and autotuned, and with ours static and dynamic, against a floor: the same bytes moved by the simplest kernel.
``compile`` measures what the backend adds to the time of a compile.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import backend, native
from .registry import all_patterns


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        name: what is done on which shape, e.g. ``"bf16 24300x11520"``.
        fn: ordinary PyTorch, which the backend is expected to rewrite.
        inputs: makes the arguments, on a device.
        floor: a call on the same arguments that moves the same bytes in the simplest way; what can't be beaten.
        goal: the largest ratio to the floor that we want.
    """

    name: str
    fn: Callable
    inputs: Callable[[torch.device], tuple]
    floor: Callable | None = None
    goal: float | None = None


#: How each column is obtained from the case's function.
WAYS: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda fn: fn,
    "inductor": lambda fn: torch.compile(fn),
    "inductor dynamic": lambda fn: torch.compile(fn, dynamic=True),
    "inductor autotuned": lambda fn: torch.compile(fn, mode="max-autotune-no-cudagraphs"),
    "fuse": lambda fn: torch.compile(fn, backend="fuse"),
    "fuse dynamic": lambda fn: torch.compile(fn, backend="fuse", dynamic=True),
}


def median_ms(fn: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call in ms; on CUDA with events and the L2 cache flushed before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(fn, warmup=20, rep=100, return_mode="median")
    fn()
    times = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < 0.5 and len(times) < 1000):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def environment() -> dict[str, Any]:
    """Device, versions and commit: what a figure means nothing without."""
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "library": native.load().key,
        "commit": commit or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cases(families: list[str] | None) -> Iterator[tuple[str, Case]]:
    for pattern in all_patterns():
        make = getattr(sys.modules[type(pattern).__module__], "bench_cases", None)
        if make is not None and (not families or pattern.name in families):
            for case in make():
                yield pattern.name, case


def run_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Times one case in every way; checks ours against eager on the way."""
    with torch.compiler.config.patch(force_disable_caches=True):  # what one case left must not make another dynamic
        return _run_case(case, device)


def _run_case(case: Case, device: torch.device) -> dict[str, Any]:
    arguments = case.inputs(device)
    expected = case.fn(*arguments)
    row: dict[str, Any] = {}
    if case.floor is not None:
        row["floor"] = median_ms(functools.partial(case.floor, *arguments), device)
    for way, prepare in WAYS.items():
        torch._dynamo.reset()
        fn = prepare(case.fn)
        result = fn(*arguments)
        if way.startswith("fuse"):
            row[f"{way} substitutions"] = len(backend.last_report().substitutions)
            torch.testing.assert_close(result, expected)
        row[way] = median_ms(functools.partial(fn, *arguments), device)
    return row


def kernels(families: list[str] | None = None, output: Path | None = None) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment()
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    print("medians in ms, L2 flushed; ratios: ours (static/dynamic) over the floor, and each peer over ours\n")
    columns = ["floor", *WAYS]
    head = "   of floor (goal)   over eager/inductor/dynamic/autotuned"
    print(f"{'case':44}" + "".join(f"{c:>19}" for c in columns) + head)
    rows = []
    for family, case in _cases(families):
        row = run_case(case, device)
        rows.append({"family": family, "case": case.name, "goal": case.goal, **row})
        print(f"{family + ': ' + case.name:44}" + "".join(f"{row.get(c, float('nan')):19.4f}" for c in columns) + _ratios(row, case))
    if output:
        output.write_text(json.dumps({"environment": facts, "kernels": rows}, indent=1))
    return 0


def _ratios(row: dict[str, Any], case: Case) -> str:
    ours = max(row["fuse"], row["fuse dynamic"])
    floor = row.get("floor", float("nan"))
    peers = "/".join(f"{row[w] / ours:.2f}" for w in list(WAYS)[:4])
    missed = "" if row["fuse substitutions"] and row["fuse dynamic substitutions"] else "   NOT SUBSTITUTED"
    return f"   {row['fuse'] / floor:.3f}/{row['fuse dynamic'] / floor:.3f} ({case.goal})   {peers}{missed}"


def compile_overhead(nodes: int = 1000, output: Path | None = None) -> int:
    """Compiles a graph without matches and prints which part of the time was ours."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for i in range(nodes // 4):  # mm, add, relu, mul: four nodes a round
            x = torch.relu(x @ w + 1.0) * (0.5 + i)
        return x

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, w = torch.randn(64, 64, device=device, dtype=torch.float64), torch.randn(64, 64, device=device, dtype=torch.float64)
    native.load()
    facts = environment()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: x + 1, backend="fuse")(x)  # imports and worker pools are not what is measured
        torch._dynamo.reset()
        began = time.perf_counter()
        torch.compile(chain, backend="fuse")(x, w)
        total = time.perf_counter() - began
    ours = backend.last_report().seconds
    count = backend.last_report().graphs[0].nodes
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    share = f"{1e3 * ours:.1f} ms = {100 * ours / total:.2f} %"
    print(f"a graph of {count} nodes without matches: compiled in {total:.2f} s, of which ours {share}")
    if output:
        figures = {"nodes": count, "total_s": total, "ours_s": ours}
        output.write_text(json.dumps({"environment": facts, "compile": figures}, indent=1))
    return 0
