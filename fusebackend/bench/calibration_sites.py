"""Random sites of the families, timed both ways: what ``calibrate`` fits its models to.

Compiling takes cores, and timing needs the device for itself. So worker processes compile in parallel without running anything, and then
time what they compiled, one process a device at a time. Nothing is taken from Inductor's caches: code that was compiled for other sizes
would serve dynamic ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.util
import os
import queue
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph

from fusebackend.backend import fuse
from fusebackend.bench import random_products
from fusebackend.bench.case import Case, random_gradient
from fusebackend.bench.case_lists import CPU_SCALE
from fusebackend.bench.kernel_time import KernelTimer
from fusebackend.bench.own_code import with_own_code
from fusebackend.profitability.estimating import Recorded, recording
from fusebackend.profitability.policy import Gate
from fusebackend.rewriting.pattern import Work
from fusebackend.rewriting.profitability_policy import Decision
from fusebackend.rewriting.registry import families
from fusebackend.rewriting.reordering import Reordering, copy_geometry
from fusebackend.rewriting.workload import log2

#: Of which there are no families: pointwise kernels of Inductor's, PyTorch's strided copy, products of 16-bit matrices, and what a
#: call costs the host.
STREAM, STRIDED_COPY, PRODUCT, HOST = "stream", "strided copy", "product", "host"

#: The part of the time in which workers compile; in the rest they measure.
_COMPILING = 0.55
#: After this part of the time for measuring, those that still compile are not waited for.
_LATE = 0.15
#: The part of the sites that is compiled with dynamic sizes.
_DYNAMIC = 0.35


@dataclasses.dataclass
class Measured:
    """One form of one site, as it was timed.

    Attributes:
        family, site: what was drawn.
        way: ``"ours"`` or ``"inductor"``.
        kernels: its kernels, each in the ways that could have been chosen.
        us: the time of all together.
        is_called: whether Inductor's form is library calls, apart from copies.
    """

    family: str
    site: str
    way: str
    kernels: list[list[Work]]
    us: float
    is_called: bool = False


@dataclasses.dataclass
class Failure:
    """A site that could not be compiled or timed, and why."""

    reason: str

    @classmethod
    def of(cls, family: str, error: Exception) -> Failure:
        error = getattr(error, "inner_exception", error)  # Dynamo's says only which backend it was
        return cls(f"{family}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")


@dataclasses.dataclass
class _Ready:
    """What a worker says once it has compiled its sites."""

    worker: int


@dataclasses.dataclass
class _Prepared:
    family: str
    case: Case
    site: str
    whole_step: bool = False  # whether forward and backward were replaced together, and are timed together
    is_called: bool = False
    calls: dict[str, Callable] = dataclasses.field(default_factory=dict)
    kernels: dict[str, list[list[Work]]] = dataclasses.field(default_factory=dict)


def measure(
    wanted: Sequence[str], minutes: float, seed: int, device: torch.device, progress: Callable[[str], None]
) -> Iterator[Measured | Failure]:
    """Draws, compiles and times sites of the ``wanted`` families, and those without a family, for about so many minutes."""
    cores, gpus = len(os.sched_getaffinity(0)), 1
    if device.type == "cuda":
        name = torch.cuda.get_device_name
        cores, gpus = cores - 1, sum(name(i) == name(device) for i in range(torch.cuda.device_count()))
    workers = max(gpus, cores)
    drawn = _drawn(wanted, device)
    context = multiprocessing.get_context("spawn")
    results, turns = context.Queue(), [context.Pipe(duplex=False) for _ in range(workers)]
    began = time.time()
    compile_until, end = began + 60 * minutes * _COMPILING, began + 60 * minutes
    arguments = [(i, workers, gpus, drawn, seed, device.type, turns[i][0], results, compile_until, end) for i in range(workers)]
    processes = [context.Process(target=_worker, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    prepared: list[int] = []
    waiting: dict[int, list[int]] | None = None  # by GPU, the workers that have not measured yet; None while there is compiling
    measuring, count = set[int](), 0

    def next_on(gpu: int) -> None:
        if waiting is not None and waiting[gpu]:
            measuring.add(worker := waiting[gpu].pop(0))
            turns[worker][1].send(True)

    try:
        while waiting is None or measuring:
            late = waiting is None and time.time() > compile_until + _LATE * (end - compile_until)
            if waiting is None and (len(prepared) == workers or (late and prepared)):
                for worker in {*range(workers)} - {*prepared}:
                    died = processes[worker].exitcode
                    processes[worker].kill()  # a site that takes so long to compile must not keep the others from being timed
                    yield Failure("compiling took longer than --minutes allow" if died is None else f"a process ended with status {died}")
                waiting = {gpu: [worker for worker in sorted(prepared) if worker % gpus == gpu] for gpu in range(gpus)}
                for gpu in range(gpus):
                    next_on(gpu)
            try:
                message = results.get(timeout=1)
            except queue.Empty:
                if time.time() > end + 60 or not any(p.is_alive() for p in processes):
                    return
                compiling = f"compiling, {max(0, compile_until - time.time()):.0f} s left"
                progress(compiling if waiting is None else f"{count} times measured, {max(0, end - time.time()):.0f} s left")
                continue
            if isinstance(message, _Ready):
                prepared.append(message.worker)
            elif isinstance(message, int):  # that worker is done; the next one on its GPU follows
                measuring.discard(message)
                next_on(message % gpus)
            else:
                count += isinstance(message, Measured)
                yield message
    finally:
        for process in processes:
            process.kill()


def _drawn(wanted: Sequence[str], device: torch.device) -> list[str]:
    """What sites are drawn of, in turn: three of each family, and one of each of what they are estimated by."""
    drawn = [*wanted, *wanted, *wanted, STREAM]
    if device.type == "cuda" or "permute" in wanted:
        drawn.append(STRIDED_COPY)
    if device.type == "cuda" and "attention" in wanted:
        drawn.append(PRODUCT)
    return drawn


def _worker(
    index: int, workers: int, gpus: int, drawn: list[str], seed: int, kind: str, turn: Any, results: Any, compile_until: float, end: float
) -> None:
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr
    device = torch.device(kind, index % gpus) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    ready = []
    with _compiling(device):
        if index < gpus and kind == "cuda":
            ready.append(_host_call(device))
        for family, case, dynamic, alternative in _cases(drawn, seed, index, workers, device):
            if time.time() > compile_until:
                break
            try:
                prepared = _prepare(family, case, dynamic, device, alternative)
            except Exception as error:  # one site's failure is no loss
                results.put(Failure.of(family, error))
                continue
            if prepared is not None:
                ready.append(prepared)
    results.put(_Ready(index))
    turn.recv()
    timer = KernelTimer(device)
    with torch.compiler.set_stance("fail_on_recompile"):
        for prepared in ready:
            if time.time() > end:
                break
            for measured in _timed(prepared, timer, device):
                results.put(measured)
    results.put(index)
    results.close()
    results.join_thread()
    # What is compiled takes long to clear away, so that only what other processes would miss is ended in order.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(0)


def _cases(drawn: Sequence[str], seed: int, first: int, step: int, device: torch.device) -> Iterator[tuple[str, Case, bool, int]]:
    """Every ``step``-th random case, family by family in turn, whether its sizes are to be dynamic, and the number of the alternative that
    is to replace it."""
    scale = CPU_SCALE if device.type == "cpu" else 1.0
    sources = {family: _draw(family, random.Random(f"{family} {seed}"), scale) for family in drawn}
    chance = random.Random(f"{first} {seed}")
    begun: set[str] = set()
    while True:
        for family in drawn:
            for _ in range(step - 1 if family in begun else first):
                next(sources[family])
            begun.add(family)
            yield family, next(sources[family]), chance.random() < _DYNAMIC, chance.getrandbits(8)


def _draw(family: str, chance: random.Random, scale: float) -> Iterator[Case]:
    if family == STREAM:
        return _streams(chance, scale)
    if family == PRODUCT:
        return random_products.random_cases(chance, scale)
    return families()["permute" if family == STRIDED_COPY else family].bench.random_cases(chance, scale)


def _streams(chance: random.Random, scale: float) -> Iterator[Case]:
    while True:
        dtype = chance.choice((torch.float32, torch.bfloat16, torch.float64))
        elements = int(scale * 2 ** chance.uniform(14, 29) / dtype.itemsize) + 1
        name = f"{dtype} {elements}"
        yield Case(name, lambda x: x + 1, functools.partial(_zeros, elements, dtype))


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor]:
    return (torch.zeros(elements, dtype=dtype, device=device),)


class _CompiledOnly(Exception):
    """Raised in place of running a graph that was compiled."""


@contextlib.contextmanager
def _compiling(device: torch.device) -> Iterator[None]:
    """A block in which compiling takes one core, caches are neither read nor written, and nothing is forgotten. Inductor's autotuning is
    shortened: by default it takes longer than all of our timing."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.runtime.benchmarking import InductorBenchmarker

    benchmark = InductorBenchmarker.benchmark_gpu

    def brief(self: Any, fn: Any, *arguments: Any, **settings: Any) -> Any:
        shorter = {"estimation_iters": 2, "memory_warmup_iters": 10, "benchmark_iters": 15, "max_benchmark_duration": 6}
        return benchmark(self, fn, *arguments, **{**settings, **shorter})

    limits: Any = {n: 1 << 20 for n in ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit") if hasattr(dynamo, n)}
    # Of C++ code the sizes are a part; without its cache each process compiles the headers.
    caches = {"force_disable_caches": True} if device.type == "cuda" else {"fx_graph_cache": False}
    changes: dict[str, Any] = {"compile_threads": 1, **caches}
    with (
        inductor.patch(changes),
        dynamo.patch(specialize_int=True, **limits),  # as of a module's numbers, such as the size of a head
        functorch.patch(enable_autograd_cache=False),
        mock.patch.object(InductorBenchmarker, "benchmark_gpu", brief),
    ):
        yield


def _prepare(family: str, case: Case, dynamic: bool, device: torch.device, alternative: int = 0) -> _Prepared | None:
    """Compiles a site both ways, and notes the work of each; None where the family finds nothing: what other families find beside it is not
    all that the site does, and would have to account for all of its time."""
    dynamic = dynamic and not case.static and family not in (STREAM, STRIDED_COPY)
    prepared = _Prepared(family, case, f"{case.name}{' dynamic' * dynamic}")
    if family == STRIDED_COPY:
        return _strided_copy(prepared, device)
    how = {"dynamic": True} if dynamic else {}
    if family == STREAM:
        n = case.inputs(torch.device("meta"))[0]
        kind = STREAM if device.type == "cuda" else "stream cpu"
        work = Work(kind, {"bytes": 2.0 * n.numel() * n.itemsize}, {"log2 itemsize": log2(n.itemsize)})
        prepared.kernels["inductor"] = [[work]]
    elif family == PRODUCT:
        prepared.kernels["inductor"] = [[random_products.work(case, dynamic, device)]]
    else:
        prepared.calls["ours"], found = _compiled(case, "ours", device, {"backend": fuse, **how}, alternative)
        if case.backward:
            prepared.whole_step = any(len(recorded.graphs) > 1 for recorded in found)
            found = [recorded for recorded in found if prepared.whole_step or "backward" in recorded.graphs]
        own = {pattern.name for pattern in families()[family].patterns}
        if not any(recorded.pattern in own for recorded in found):
            return None
        prepared.kernels["ours"] = [kernel for recorded in found for kernel in recorded.ours]
        prepared.is_called = all(recorded.is_called for recorded in found)
        if any(recorded.inductor is None for recorded in found):
            return prepared
        prepared.kernels["inductor"] = [kernel for recorded in found for kernel in recorded.inductor or ()]
    prepared.calls["inductor"], _ = _compiled(case, "inductor", device, how)
    return prepared


def _strided_copy(prepared: _Prepared, device: torch.device) -> _Prepared | None:
    """PyTorch's own copy, called as it is, of what the case of ``permute`` makes contiguous."""
    views: list[torch.Tensor] = []

    def note(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        views.append(x)
        return x

    with mock.patch.object(torch.Tensor, "contiguous", note):
        prepared.case.fn(*prepared.case.inputs(torch.device("meta")))
    reordering = Reordering.of(views[0], list(range(views[0].dim())))
    if reordering is None or reordering.source_order == reordering.result_order:
        return None
    work = Work("strided copy cpu" if device.type == "cpu" else "strided copy", *copy_geometry(reordering))
    prepared.calls["inductor"], prepared.kernels["inductor"] = prepared.case.fn, [[work]]
    return prepared


def _host_call(device: torch.device) -> _Prepared:
    """A sum so small that its calls take as long as the host needs."""
    case = Case("a call", lambda x, y: x.t() + y, lambda device: (torch.ones(24, 8, device=device), torch.ones(8, 24, device=device)))
    prepared = _Prepared(HOST, case, case.name)
    for way, how in (("ours", {"backend": fuse}), ("inductor", {})):
        prepared.calls[way], _ = _compiled(case, way, device, how)
        prepared.kernels[way] = []
    return prepared


def _compiled(case: Case, way: str, device: torch.device, how: dict[str, Any], alternative: int = 0) -> tuple[Callable, list[Recorded]]:
    """``case.fn`` compiled but not run, and the work that was met."""
    compiled = torch.compile(with_own_code(case.fn, f"{case.name} {way}"), **how)
    with recording(alternative) as found, mock.patch.object(Gate, "decide", lambda *_: Decision()):
        if case.backward:  # the backward is compiled when it is first run
            _steps(compiled, case, device)[-1]()
        else:
            with mock.patch.object(CompiledFxGraph, "__call__", _stop), torch.no_grad(), contextlib.suppress(_CompiledOnly):
                compiled(*_empty_inputs(case, device))
    return compiled, found


def _stop(self: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
    raise _CompiledOnly


def _empty_inputs(case: Case, device: torch.device) -> list[torch.Tensor]:
    """Inputs of the right sizes with whatever is in memory: they are not read."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fakes = case.inputs(device)
    inputs = [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=device).requires_grad_(f.requires_grad) for f in fakes]
    return [torch.nn.Parameter(x) if isinstance(f, torch.nn.Parameter) else x for x, f in zip(inputs, fakes)]


def _steps(fn: Callable, case: Case, device: torch.device) -> tuple[Callable[[], Any], ...]:
    """Calls of the forward and, if that is asked for, of the backward."""
    torch.manual_seed(0)
    arguments = case.inputs(device)
    if case.backward:
        for i, argument in enumerate(arguments):
            argument.requires_grad_(i in case.backward)
    forward = functools.partial(fn, *arguments)
    if not case.backward:
        return (forward,)
    out = forward()
    leaves, grad = [arguments[i] for i in case.backward], random_gradient(out)
    return forward, lambda: torch.autograd.grad(out, leaves, grad)


def _timed(prepared: _Prepared, timer: KernelTimer, device: torch.device) -> Iterator[Measured | Failure]:
    for way, call in prepared.calls.items():
        try:
            with contextlib.nullcontext() if prepared.case.backward else torch.no_grad():
                steps = _steps(call, prepared.case, device)
                time_us = timer.host_us if prepared.family == HOST else timer.us
                us = sum(time_us(_inner(step)) for step in (steps if prepared.whole_step else steps[-1:]))
        except Exception as error:  # out of memory, say
            yield Failure.of(prepared.family, error)
            continue
        yield Measured(prepared.family, prepared.site, way, prepared.kernels[way], us, prepared.is_called)
    prepared.calls.clear()
    if device.type == "cuda" and torch.cuda.memory_reserved() > torch.cuda.get_device_properties(device).total_memory // 8:
        torch.cuda.empty_cache()


def _inner(call: Callable[[], Any]) -> Callable[[], Any]:
    """The compiled graph that ``call`` calls last, with its inputs: what a graph around it would do, without Dynamo's and autograd's part.
    ``call`` itself where it calls none."""
    met: list[tuple[CompiledFxGraph, list[Any]]] = []
    original = CompiledFxGraph.__call__

    def note(self: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        # Libraries write into what Inductor allocated, which autograd forbids where an input requires gradients.
        met.append((self, [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]))
        return original(self, inputs)

    with mock.patch.object(CompiledFxGraph, "__call__", note):
        call()
    if not met:
        return call
    graph, inputs = met[-1]
    code: Any = graph.current_callable
    return lambda: code(list(inputs))
