"""``python -m fusebackend bench``: every peer and ours, measured in one run.

``kernels`` times the cases that the families bring along (``bench_cases`` in their files) eagerly, with Inductor static,
dynamic and autotuned, and with ours static and dynamic, against a floor: the same bytes moved by the simplest kernel.
``models`` times steps of public models with Inductor and with ours. ``compile`` measures what the backend adds to the time
of a compile.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import backend, native
from .registry import all_patterns


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        name: what is done on which shape, e.g. ``"bf16 24300x11520"``; unique in its family.
        fn: ordinary PyTorch, which the backend is expected to rewrite. It may change its arguments in place.
        inputs: makes the arguments, on a device; the same ones after the same ``torch.manual_seed``.
        floor: a call on the same arguments that moves the same bytes in the simplest way; what can't be beaten.
        goal: the largest ratio to the floor that we want: short for ``goals={"floor": goal}``.
        goals: column -> the largest ratio of our time to it that we want; ``"ms"`` -> our largest time in ms. Columns are
            ``"floor"``, those of ``WAYS`` and those of ``peers``.
        peers: more columns: name -> what prepares a peer from the arguments and returns the call, without arguments, that
            is timed.
        backward: positions of the inputs whose gradients are asked for. If there are any, the backward of ``fn`` alone is
            timed in place of ``fn``.
        deterministic: compiled and timed under ``torch.use_deterministic_algorithms``.
        flops: floating-point operations of one call, for a rate.
    """

    name: str
    fn: Callable
    inputs: Callable[[torch.device], tuple]
    floor: Callable | None = None
    goal: float | None = None
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peers: Mapping[str, Callable[..., Callable[[], Any]]] = dataclasses.field(default_factory=dict)
    backward: tuple[int, ...] = ()
    deterministic: bool = False
    flops: int | None = None


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


#: What a model is timed at: name -> (training, dtype). bf16 training runs under autocast, as it is done.
KINDS: dict[str, tuple[bool, torch.dtype]] = {
    "training-fp32": (True, torch.float32),
    "training-bf16": (True, torch.bfloat16),
    "inference-bf16": (False, torch.bfloat16),
    "inference-fp32": (False, torch.float32),
}


def run_model(name: str, kind: str, device: torch.device) -> dict[str, Any]:
    """Times a step of one model with Inductor and with ours, in turn; ``difference`` is that of the outputs, relative."""
    from .models import MODELS

    training, dtype = KINDS[kind]
    torch.manual_seed(0)
    model, inputs = MODELS[name](device)
    model.train(training)
    if not training:
        model, inputs = model.to(dtype), tuple(i.to(dtype) if i.is_floating_point() else i for i in inputs)
    autocast = torch.autocast(device.type, dtype, enabled=training and dtype != torch.float32)
    steps, outputs = {}, {}
    for way in ("inductor", "fuse"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=way)

        def step(compiled=compiled):
            model.zero_grad()
            with autocast, torch.set_grad_enabled(training):
                out = compiled(*inputs)
            if training:
                out.float().square().mean().backward()
            return out.detach()

        torch.manual_seed(0)  # dropout draws the same numbers in both
        outputs[way] = step().float()
        steps[way] = step
    counts: dict[str, int] = {}
    for each in backend.reports():
        for pattern, n in each.counts().items():
            counts[pattern] = counts.get(pattern, 0) + n
    row: dict[str, Any] = {"model": name, "kind": kind, "substitutions": counts}
    difference = (outputs["fuse"] - outputs["inductor"]).norm() / outputs["inductor"].norm()
    row["difference"] = difference.item()
    rounds = {way: [] for way in steps}
    for _ in range(3):  # in turn, so that what changes over time changes both alike
        for way, step in steps.items():
            rounds[way].append(median_ms(step, device))
    row |= {way: statistics.median(times) for way, times in rounds.items()}
    return row


def models(names: list[str] | None = None, output: Path | None = None) -> int:
    """Prints a row for each ``model:kind`` (default: every model that this device suits, training fp32 and inference bf16)."""
    from .models import MODELS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    suited = [m for m in MODELS if m != "byte_lm"] if device.type == "cuda" else ["byte_lm"]
    wanted = names or [f"{m}:{k}" for m in suited for k in ("training-fp32", "inference-bf16")]
    for each in wanted:
        model, _, kind = each.partition(":")
        if model not in MODELS or kind not in KINDS:
            raise ValueError(f"bench models: {each!r}; model:kind of {', '.join(MODELS)} and {', '.join(KINDS)} is accepted")
    facts = environment()
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    print(f"{'model':34}{'inductor ms':>12}{'fuse ms':>10}{'ratio':>8}{'difference':>12}   substitutions")
    rows = []
    for each in wanted:
        model, _, kind = each.partition(":")
        try:
            row = run_model(model, kind, device)
        except ImportError as error:
            print(f"{each:34}not run: {error}; pip install 'fusebackend[models]'")
            continue
        rows.append(row)
        found = ", ".join(f"{p} {n}" for p, n in row["substitutions"].items()) or "none"
        ratio = row["inductor"] / row["fuse"]
        print(f"{each:34}{row['inductor']:12.3f}{row['fuse']:10.3f}{ratio:8.2f}{row['difference']:12.1e}   {found}", flush=True)
    if output:
        output.write_text(json.dumps({"environment": facts, "models": rows}, indent=1))
    return 0


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
