"""``bench compile``: the time of a compile with Inductor and with fuse, with cold and with warm caches.

Each figure is the time of the first call (forward, and backward in training) in a process of its own, with both packages
imported, the native library loaded and a trivial function compiled before. A cold process starts with empty caches; the warm
processes that follow it find what it left there. Processes with Inductor and with fuse alternate, and medians are compared.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fusebackend import backend
from fusebackend.bench.environment import default_device
from fusebackend.bench.job import Failure
from fusebackend.bench.process_pool import MIN_CORES, cancelling
from fusebackend.bench.rows import Row
from fusebackend.native import loader

#: What is compiled: name -> (a key of model_zoo.MODELS, or None for :func:`chain`; its kind).
GRAPHS: dict[str, tuple[str | None, str]] = {
    "1,000 nodes without matches": (None, "inference-fp32"),
    "byte_lm training": ("byte_lm", "training-fp32"),
    "gpt2_small training": ("gpt2_small", "training-fp32"),
}

#: Those that are not timed on a CPU by default, where all of Inductor's kernels go through a C++ compiler.
LARGE = ("gpt2_small training",)

WAYS = ("inductor", "fuse")

#: The caches that the processes of one repetition find. Warm compiles are short, so there are two of them.
CACHES = ("cold", "warm", "warm")

HEADING = f"{'compile':30}{'caches':8}{'inductor s':>12}{'fuse s':>10}{'fuse/inductor':>15}{'ours':>10}"


def line(row: Row) -> str:
    """A row as it is printed."""
    times = f"{row['s']['inductor']:12.2f}{row['s']['fuse']:10.2f}{row['ratio']:15.3f}{100 * row['ours']:8.2f} %"
    missed = "" if row["cache"] == "cold" or row["from_cache"] else ", compiled again"
    return f"{row['graph']:30}{row['cache']:8}{times}   {row['substitutions']} substitutions{missed}"


def of_model(model: str, kind: str) -> str:
    """What :func:`run` calls the step of a model.

    Args:
        model, kind: as for :class:`fusebackend.bench.workload.Workload`.
    """
    return f"{model} {kind}"


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """1,000 nodes: mm, add, relu and mul in each of 250 rounds, in float64, which no pattern takes.

    One kernel serves all rounds, so that graph passes, and not the compilers of kernels, take most of the time.
    """
    for _ in range(250):
        x = torch.relu(x @ w + 1.0) * 0.5
    return x


def run(graphs: Sequence[str], repeats: int) -> Iterator[tuple[dict[str, str], Row | Failure]]:
    """Yields the names and the figures of two rows a graph, with cold and with warm caches.

    Figures: ``s``, the seconds by way; ``ratio`` of fuse to Inductor, the median over pairs; ``ours``, the part of a compile
    with fuse that was spent in this package; ``substitutions``; ``from_cache``, whether fuse's code came from Inductor's cache each time.

    Args:
        graphs: keys of ``GRAPHS``, or what :func:`of_model` gives.
    """
    cores = len(os.sched_getaffinity(0))
    in_parallel = max(1, cores // 4) if cores >= MIN_CORES else 1
    tasks = [(g, i, w) for g in graphs for i in range(repeats) for w in (WAYS if i % 2 == 0 else WAYS[::-1])]
    with concurrent.futures.ThreadPoolExecutor(in_parallel) as pool, cancelling(pool):
        found = [(task, pool.submit(_cold_and_warm, task[0], task[2])) for task in tasks]
        for graph in graphs:
            times: dict[tuple[str, str], list[dict[str, float]]] = collections.defaultdict(list)
            failure = None
            for (_, _, way), future in [f for f in found if f[0][0] == graph]:
                try:
                    for cache, figures in zip(CACHES, future.result()):
                        times[cache, way].append(figures)
                except subprocess.CalledProcessError as error:
                    lines = error.stderr.strip().splitlines()
                    failure = Failure("the compiling process failed", lines[-1] if lines else f"exit code {error.returncode}")
            if failure:
                yield {"graph": graph, "cache": "cold"}, failure
                continue
            for cache in ("cold", "warm"):
                yield {"graph": graph, "cache": cache}, _figures({way: times[cache, way] for way in WAYS})


def _figures(times: dict[str, list[dict[str, float]]]) -> Row:
    """The figures of a row, from what the processes of each way found."""
    seconds = {way: [t["s"] for t in times[way]] for way in WAYS}
    return {
        "s": {way: statistics.median(s) for way, s in seconds.items()},
        "ratio": statistics.median(f / i for i, f in zip(seconds["inductor"], seconds["fuse"])),
        "ours": statistics.median(t["ours"] / t["s"] for t in times["fuse"]),
        "substitutions": times["fuse"][0]["substitutions"],
        "from_cache": all(t["from_cache"] for t in times["fuse"]),
    }


def _cold_and_warm(graph: str, way: str) -> list[dict[str, float]]:
    """What one process finds with each of ``CACHES``, one after another."""
    library = loader.load().path
    with tempfile.TemporaryDirectory(prefix="fusebackend-bench-") as caches:
        variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "FUSEBACKEND_CACHE_DIR": f"{caches}/fuse"}
        variables["TRITON_CACHE_DIR"] = f"{caches}/triton"
        if library is not None:
            variables["FUSEBACKEND_LIBRARY"] = str(library.parent)
        os.mkdir(f"{caches}/fuse", 0o700)
        command = [sys.executable, "-m", "fusebackend.bench.compile_time", graph, way]
        found = []
        for _ in CACHES:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        return found


# ---- in a process of its own ----


def _first_call(graph: str, way: str) -> dict[str, float]:
    device = default_device()
    loader.load()
    small = torch.ones(3, device=device, requires_grad=True)
    torch.compile(lambda x: x.sin() + 1, backend=way)(small).sum().backward()
    step = _step(graph, way, device)
    known = len(backend.reports())
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    reports = backend.reports()[known:]
    return {
        "s": seconds,
        "ours": sum(r.seconds for r in reports),
        "substitutions": sum(len(r.substitutions) for r in reports),
        "from_cache": all(r.from_cache for r in reports),
    }


def _step(graph: str, way: str, device: torch.device) -> Callable[[], object]:
    model, _, of = graph.rpartition(" ")
    name, kind = GRAPHS.get(graph, (model, of))
    if name is None:
        x, w = (torch.randn(64, 64, device=device, dtype=torch.float64) for _ in range(2))
        compiled = torch.compile(chain, backend=way)
        return lambda: compiled(x, w)
    from fusebackend.bench.workload import Workload

    return Workload(name, kind, device).step(way)


if __name__ == "__main__":
    print(json.dumps(_first_call(*sys.argv[1:])))
