"""``bench kernels``: the cases that the families bring along, in every way, against a floor and other peers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusebackend import backend
from fusebackend.bench import random_shapes
from fusebackend.bench.case import Case
from fusebackend.bench.device_time import median_ms
from fusebackend.bench.pool import Failure, Row, patiently
from fusebackend.rewriting.registry import families

#: How each column is obtained from the case's function: arguments of torch.compile, or None for eager. The gate is off:
#: what is timed is the kernel, whether it pays or not.
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "inductor dynamic": {"dynamic": True},
    "inductor autotuned": {"mode": "max-autotune-no-cudagraphs"},
    "fuse": {"backend": "fuse", "options": {"fuse.gate": "off"}},
    "fuse dynamic": {"backend": "fuse", "dynamic": True, "options": {"fuse.gate": "off"}},
}

#: The ways that random shapes are timed in.
RANDOM_WAYS = ("eager", "inductor", "fuse")

#: Our error may be so many times eager's, and so many roundings more: eager's own is not the same at every run.
ERROR_FACTOR, ERROR_ROUNDINGS = 4, 2


@dataclasses.dataclass(frozen=True)
class KernelJob:
    """One case, by family and name; one of ``random`` = (count, seed) random shapes if that is given."""

    family: str
    name: str
    ways: tuple[str, ...] = tuple(WAYS)
    random: tuple[int, int] | None = None

    @property
    def names(self) -> dict[str, str]:
        return {"family": self.family, "case": self.name}

    @property
    def weight(self) -> int:
        return 0

    def prepare(self, device: torch.device) -> Callable[[], Row]:
        case = next(c for c in _cases(self.family, self.random) if c.name == self.name)
        return Prepared(case, self.ways, device).measure


def _cases(family: str, random: tuple[int, int] | None) -> list[Case]:
    cases = families()[family].bench.cases() if random is None else random_shapes.cases(family, *random)
    if len({c.name for c in cases}) < len(cases):
        raise ValueError(f"{family}: two cases of one name, among {', '.join(c.name for c in cases)}")
    return cases


def jobs(wanted: Sequence[str] = (), case: str = "", ways: Sequence[str] = (), random: int = 0, seed: int = 0) -> list[KernelJob]:
    """Those of the ``wanted`` families (default: all) whose name contains ``case``; or ``random`` shapes of each."""
    found = []
    for family in families():
        if wanted and family not in wanted:
            continue
        drawn = (random, seed) if random else None
        chosen = tuple(ways) or (RANDOM_WAYS if drawn else tuple(WAYS))
        found += [KernelJob(family, c.name, chosen, drawn) for c in _cases(family, drawn) if case in c.name]
    return found


_NAME, _COLUMN = 46, 11


def heading(ways: Sequence[str]) -> str:
    short = [w.replace("inductor", "ind.").replace("dynamic", "dyn.").replace("autotuned", "tuned") for w in WAYS if w in ways]
    return f"{'ms':{_NAME}}" + "".join(f"{c:>{_COLUMN}}" for c in ["floor", *short]) + "   inductor/fuse (dynamic)   reached (goal)"


def line(row: Row) -> str:
    """A row as it is printed: times, ratios to Inductor, goals, other peers, and what went wrong."""
    from fusebackend.bench.results import goals, ratios

    columns = ["floor", *(w for w in WAYS if w in row["ms"] or w in row["failed"])]
    times = "".join(f"{row['ms'][c]:{_COLUMN}.4f}" if c in row["ms"] else f"{'-':>{_COLUMN}}" for c in columns)
    parts = [" ".join(f"{r:.2f}" for r in ratios("kernels", row).values())]
    parts += [f"{c} {reached:.3f} ({goal:.3g}{'' if reached <= goal else ', missed'})" for c, reached, goal in goals(row)]
    parts += [f"{name} {ms:.4f} ms" for name, ms in row["ms"].items() if name not in columns]
    if "flops" in row and "fuse" in row["ms"]:
        parts.append(f"{row['flops'] / row['ms']['fuse'] / 1e9:.1f} TFLOP/s")
    parts += [f"NOT SUBSTITUTED in {way}" for way, n in row["substitutions"].items() if not n]
    parts += [f"WRONG in {way}: error {row['error'][way]:.1e}, eager {row['error']['eager']:.1e}" for way in row.get("wrong", [])]
    parts += [f"no {way}: {why}" for way, why in row["failed"].items()]
    return f"{row['family'] + ': ' + row['case']:{_NAME}}{times}   " + "; ".join(p for p in parts if p)


class Prepared:
    """A case that is compiled in every way and whose results were compared; ``measure`` gives its row.

    A row has ``ms``, the time of each column; ``substitutions`` in our ways; ``error``, the largest relative error of a
    result (norm of the difference over the norm) to float64, by way; and ``failed``, why a column is missing.
    """

    def __init__(self, case: Case, ways: Sequence[str], device: torch.device):
        self.case, self.device = case, device
        self.row: Row = {"goals": case.all_goals(), "ms": {}, "substitutions": {}, "error": {}, "failed": {}}
        if case.flops:
            self.row["flops"] = case.flops
        self.calls: dict[str, Callable[[tuple], Callable[[], Any]]] = {}
        results = {}
        with self._setting():
            for way in [w for w in ways if not case.ways or w in case.ways]:
                how = WAYS[way]
                fn = _separate(case.fn, f"{case.name} {way}")
                known = {id(r) for r in backend.reports()}
                try:
                    fn = fn if how is None else torch.compile(fn, **how)
                    arguments = self._arguments()
                    results[way] = _tensors(patiently(self._bound(fn, arguments)), arguments)
                except Exception as error:  # one way's failure must not hide the others
                    self.row["failed"][way] = str(Failure.of(error))
                    continue
                self.calls[way] = functools.partial(self._bound, fn)
                if way.startswith("fuse"):
                    self.row["substitutions"][way] = sum(len(r.substitutions) for r in backend.reports() if id(r) not in known)
            self._compare(results)
            if case.floor is not None:
                self.calls["floor"] = _spread(functools.partial, case.floor)
            for name, prepare in case.peers.items():
                call = prepare(*self._arguments(grad=False))
                call()
                self.calls[name] = _spread(prepare)

    def measure(self) -> Row:
        with self._setting():
            for column in ["floor", *WAYS, *self.case.peers]:
                if column in self.calls:
                    call = self.calls[column](self._arguments(grad=column in WAYS))
                    self.row["ms"][column] = median_ms(call, self.device)
                    del call
        return self.row

    @contextlib.contextmanager
    def _setting(self) -> Iterator[None]:
        was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(was or self.case.deterministic)
        try:
            # A backward is called many times over; donated buffers would be gone after the first.
            with torch._functorch.config.patch(donated_buffer=False):
                yield
        finally:
            torch.use_deterministic_algorithms(was)

    def _arguments(self, grad: bool = True) -> tuple:
        torch.manual_seed(0)
        arguments = self.case.inputs(self.device)
        for i in self.case.backward if grad else ():
            arguments[i].requires_grad_()
        return arguments

    def _bound(self, fn: Callable, arguments: tuple) -> Callable[[], Any]:
        if not self.case.backward:
            return functools.partial(fn, *arguments)
        out = fn(*arguments)
        torch.manual_seed(1)
        grad = torch.randn(out.shape, device=out.device).to(out.dtype)
        return functools.partial(torch.autograd.grad, out, [arguments[i] for i in self.case.backward], grad, retain_graph=True)

    def _compare(self, results: dict[str, list[torch.Tensor]]) -> None:
        """Fills in ``error``, and ``wrong`` where ours is more than rounding explains."""
        if "eager" not in results or not any(w.startswith("fuse") for w in results):
            return
        reference = self._in_float64() or results["eager"]
        for way, tensors in results.items():
            self.row["error"][way] = max(map(_difference, tensors, reference), default=0.0)
        floats = [t.dtype for t in results["eager"] if t.is_floating_point()]
        rounding = max((torch.finfo(d).eps for d in floats), default=0.0)
        bound = ERROR_FACTOR * self.row["error"]["eager"] + ERROR_ROUNDINGS * rounding
        self.row["wrong"] = [w for w, e in self.row["error"].items() if w.startswith("fuse") and not e <= bound]

    def _in_float64(self) -> list[torch.Tensor] | None:
        arguments = tuple(
            a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in self._arguments()
        )
        try:
            return _tensors(self._bound(self.case.fn, arguments)(), arguments)
        except Exception:  # a dtype is pinned in it, or float64 has no kernel
            return None


def _spread(fn: Callable, *first: Any) -> Callable[[tuple], Any]:
    return lambda arguments: fn(*first, *arguments)


def _separate(fn: Callable, name: str) -> Callable:
    """``fn`` behind a code object of its own: Dynamo keeps what it compiled by code object, and no way may be served what
    was compiled for another."""

    def call(*arguments):
        return fn(*arguments)

    return types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)


def _tensors(result: Any, arguments: tuple) -> list[torch.Tensor]:
    """What was computed: the result's tensors, or the arguments of a function that changes them and returns nothing."""
    leaves = torch.utils._pytree.tree_leaves(arguments if result is None else result)
    return [t.detach().clone() for t in leaves if isinstance(t, torch.Tensor)]


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return ((ours.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
