"""``bench kernels``: the families' cases, compiled in every way, beside a floor and other peers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config

from fusebackend import backend
from fusebackend.bench.case import Case, random_gradient
from fusebackend.bench.case_lists import random_cases, table_cases
from fusebackend.bench.device_time import median_ms
from fusebackend.bench.job import Failure, retry_out_of_memory
from fusebackend.bench.own_code import with_own_code
from fusebackend.bench.rows import Row, goals, ratios
from fusebackend.rewriting.registry import families

#: How each column is obtained from a case's function: the arguments of torch.compile, or None for eager.
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "inductor dynamic": {"dynamic": True},
    "inductor autotuned": {"mode": "max-autotune-no-cudagraphs"},
    "fuse": {"backend": "fuse"},
    "fuse dynamic": {"backend": "fuse", "dynamic": True},
}

#: The ways that random shapes are timed in.
RANDOM_WAYS = ("eager", "inductor", "fuse")

#: ``fuse.gate`` of fuse's ways. A table shows the kernels, whether they pay or not. Random shapes show what a user gets: whether any
#: substitution that is made by default is slower than Inductor.
TABLE_GATE, RANDOM_GATE = "off", "auto"

#: An error may be so many times eager's, plus so many roundings: eager's error differs from run to run.
ERROR_FACTOR, ERROR_ROUNDINGS = 4, 2


@dataclasses.dataclass(frozen=True)
class KernelJob:
    """One case, by family and name.

    Attributes:
        family, name: which case.
        ways: keys of ``WAYS``.
        gate: ``fuse.gate`` of fuse's ways.
        random: the count and the seed of the random cases that it is one of; None for a case of the table.
    """

    family: str
    name: str
    ways: tuple[str, ...] = tuple(WAYS)
    gate: str = TABLE_GATE
    random: tuple[int, int] | None = None

    @property
    def names(self) -> dict[str, str]:
        return {"family": self.family, "case": self.name}

    @property
    def weight(self) -> int:
        return 0

    def prepare(self, device: torch.device) -> Callable[[], Row]:
        case = next(c for c in _cases(self.family, self.random) if c.name == self.name)
        return Prepared(case, self.ways, device, self.gate).measure


def _cases(family: str, random: tuple[int, int] | None) -> list[Case]:
    return table_cases(family) if random is None else random_cases(family, *random)


def jobs(
    wanted: Sequence[str] = (), case: str = "", ways: Sequence[str] = (), random: int = 0, seed: int = 0, gate: str | None = None
) -> list[KernelJob]:
    """The cases of the ``wanted`` families (default: all) whose name contains ``case``: of their tables, or ``random`` shapes of each."""
    drawn = (random, seed) if random else None
    ways = tuple(ways) or (RANDOM_WAYS if drawn else tuple(WAYS))
    gate = gate or (RANDOM_GATE if drawn else TABLE_GATE)
    chosen = [family for family in families() if not wanted or family in wanted]
    return [KernelJob(family, c.name, ways, gate, drawn) for family in chosen for c in _cases(family, drawn) if case in c.name]


_NAME, _COLUMN = 46, 11


def heading(ways: Sequence[str]) -> str:
    short = [w.replace("inductor", "ind.").replace("dynamic", "dyn.").replace("autotuned", "tuned") for w in WAYS if w in ways]
    return f"{'ms':{_NAME}}" + "".join(f"{c:>{_COLUMN}}" for c in ["floor", *short]) + "   inductor/fuse (dynamic)   reached (goal)"


def line(row: Row) -> str:
    """A row as it is printed: times, ratios to Inductor, goals, other peers, and what went wrong."""
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
    """A case that is compiled in every way and whose results were compared. ``measure`` gives its row.

    A row has ``ms``, the time of each column; ``gate``, the ``fuse.gate`` of fuse's ways; ``substitutions`` in these; ``error``, by
    way, the largest relative error of a result to float64 (norm of the difference over the norm); ``wrong``, those of fuse's
    ways whose error is larger than rounding explains; and ``failed``, why a column is missing.
    """

    def __init__(self, case: Case, ways: Sequence[str], device: torch.device, gate: str = TABLE_GATE):
        self.case, self.device = case, device
        self.row: Row = {"goals": case.all_goals(), "gate": gate, "ms": {}, "substitutions": {}, "error": {}, "failed": {}}
        if case.flops:
            self.row["flops"] = case.flops
        self.calls: dict[str, Callable[[tuple], Callable[[], Any]]] = {}
        results = {}
        with self._settings():
            for way in [w for w in ways if not case.ways or w in case.ways]:
                fn = with_own_code(case.fn, f"{case.name} {way}")
                known = {id(r) for r in backend.reports()}
                try:
                    fn = _compiled(fn, WAYS[way], gate)
                    arguments = self._arguments()
                    results[way] = _tensors(retry_out_of_memory(self._bound(fn, arguments)), arguments)
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
                try:
                    prepare(*self._arguments(grad=False))()
                except Exception as error:  # what one peer does not support must not hide the others
                    self.row["failed"][name] = str(Failure.of(error))
                    continue
                self.calls[name] = _spread(prepare)

    def measure(self) -> Row:
        with self._settings():
            for column in ["floor", *WAYS, *self.case.peers]:
                if column in self.calls:
                    call = self.calls[column](self._arguments(grad=column in WAYS))
                    self.row["ms"][column] = median_ms(call, self.device)
                    del call
        return self.row

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(was_deterministic or self.case.deterministic)
        try:
            # A backward is called many times; donated buffers would be gone after the first. Inductor's caches don't look at the hints of
            # symbolic sizes: a dynamic case would be given code that was tuned for another one.
            with (
                torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False),
                torch._inductor.config.patch(fx_graph_cache=False),
            ):
                yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)

    def _arguments(self, grad: bool = True) -> tuple:
        torch.manual_seed(0)
        arguments = self.case.inputs(self.device)
        for i in self.case.backward if grad else ():
            arguments[i].requires_grad_()
        return arguments

    def _bound(self, fn: Callable, arguments: tuple) -> Callable[[], Any]:
        """The call that is timed: ``fn`` on the arguments, or its backward alone."""
        if not self.case.backward:
            return functools.partial(fn, *arguments)
        out = fn(*arguments)
        torch.manual_seed(1)
        leaves = [arguments[i] for i in self.case.backward]
        return functools.partial(torch.autograd.grad, out, leaves, random_gradient(out), retain_graph=True)

    def _compare(self, results: dict[str, list[torch.Tensor]]) -> None:
        """Fills in ``error`` and ``wrong``."""
        if "eager" not in results or not any(w.startswith("fuse") for w in results):
            return
        reference = self._in_float64() or results["eager"]
        for way, tensors in results.items():
            self.row["error"][way] = max(map(_relative_error, tensors, reference), default=0.0)
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
        except Exception:  # the function fixes a dtype, or an operator has no float64 kernel
            return None


def _compiled(fn: Callable, how: dict[str, Any] | None, gate: str) -> Callable:
    """``fn`` compiled in one of ``WAYS``; ``gate`` is for the ways of this backend, unless they name their own."""
    if how is None:
        return fn
    if how.get("backend") == "fuse":
        how = {**how, "options": {"fuse.gate": gate, **how.get("options", {})}}
    return torch.compile(fn, **how)


def _spread(fn: Callable, *first: Any) -> Callable[[tuple], Any]:
    return lambda arguments: fn(*first, *arguments)


def _tensors(result: Any, arguments: tuple) -> list[torch.Tensor]:
    """What was computed: the result's tensors, or the arguments of a function that modifies them and returns nothing."""
    leaves = torch.utils._pytree.tree_leaves(arguments if result is None else result)
    return [t.detach().clone() for t in leaves if isinstance(t, torch.Tensor)]


def _relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return ((result.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
