"""Runs a program eagerly, in float64 and with ``backend="fuse"``, and says what differs.

Compared are every output's values, shape, dtype, strides, and the inputs and outputs that it shares memory with; every input
after the call; the gradients; and whether there is an exception. A value is wrong if its error against float64 is several
times eager's and several times what roundings of the inputs cause, and more than rounding of the result; a program that only
moves data must agree in every bit. Where the program in float64 raises, or shares other memory, there is no reference, and
floating-point values are not judged. A difference counts only if the same compile without substitutions does not have it: what
Inductor makes of a program (it may turn an exception or a stride into another) is not this package's to change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusebackend.fuzz.execution import Outcome, calls, run, run_compiled, shares_memory
from fusebackend.fuzz.imagined_gpu import IMAGINED_DEVICE, imagined_gpu
from fusebackend.fuzz.programs import TYPES, Program

#: A value may be off by so many times eager's largest error over the tensor, or its sensitivity ...
ERROR_RATIO = 4.0

#: ... plus so many roundings of the largest value; more of float32 and float64, whose sums are long.
ROUNDINGS, MANY_ROUNDINGS = {torch.float16: 2, torch.bfloat16: 2}, 16

#: How many times the inputs are rounded at random.
NUDGES = 4


@dataclasses.dataclass
class Comparison:
    """The result of :func:`check`.

    Attributes:
        wrong: the differences that this package causes, in words.
        inductors: how many differences Inductor has without it.
        counts: pattern -> substitutions.
        skipped: why the program tells nothing, e.g. because eager raises.
        unjudged: why there is no reference in float64, so that floating-point values were not judged.
    """

    wrong: list[str] = dataclasses.field(default_factory=list)
    inductors: int = 0
    counts: Counter = dataclasses.field(default_factory=Counter)
    skipped: str | None = None
    unjudged: str | None = None

    def __str__(self) -> str:
        return "\n".join(self.wrong) or "no difference"


def check(program: Program, device: str = "cpu", codegen: bool = False) -> Comparison:
    """Compares ``program`` with eager.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"imagined"``: on the CPU, rewritten as on a GPU (:mod:`fusebackend.fuzz.imagined_gpu`).
        codegen: through Inductor's code generation; otherwise, and always on an imagined GPU, the rewritten graph is interpreted.
    """
    if device != IMAGINED_DEVICE:
        return _check(program, device, codegen)
    with imagined_gpu():
        return _check(dataclasses.replace(program, gate="off"), "cpu", codegen=False)


def _check(program: Program, device: str, codegen: bool) -> Comparison:
    comparison = Comparison()
    if (device != "cpu" or codegen) and any(spec.reaches_no_row for spec in program.inputs):
        # PyTorch's kernels on a CPU let some of them pass. On a GPU index_add fails an assertion, and what Inductor generates for
        # _unsafe_masked_index_put_accumulate writes outside of the tensor: either ends the process.
        comparison.skipped = "an index into no rows"
        return comparison
    with _quiet(), program.context(device), torch.random.fork_rng(devices=[]):
        comparison.skipped = _undefined(program)
        if comparison.skipped:
            return comparison
        if device != "cpu" or codegen:  # where an index out of range, say, may end the process: in Inductor's loops on a CPU too
            tried = [run(program.function(), program, "cpu", second).error for second in calls(program)]
            if any(tried):
                comparison.skipped = next(filter(None, tried))
                return comparison
        expected = [run(program.function(), program, device, second) for second in calls(program)]
        if expected[0].error and "bad index" not in {spec.fill for spec in program.inputs}:
            comparison.skipped = expected[0].error
            return comparison
        exact = [run(program.function(wide=True), program, device, second, wide=True) for second in calls(program)]
        comparison.unjudged = next(filter(None, map(_no_reference, expected, exact)), None)
        got, comparison.counts = run_compiled(program, device, codegen)
        found = _differences(program, expected, exact, got)
        slack: list[dict[str, float]] = []
        terms: list[dict[str, _Terms]] = []
        if any("values" in what for what in found):
            slack, terms = _sensitivity(program, device, exact), _terms(program, device)
            found = _differences(program, expected, exact, got, slack, terms)
        if found:
            plain, _ = run_compiled(program, device, codegen, patterns=())
            ours = _differences(program, plain, exact, got, slack, terms).keys() - _predicted_strides(program, device, got)
            comparison.wrong = [text for what, text in found.items() if what in ours]
            comparison.inductors = len(found) - len(comparison.wrong)
    return comparison


class _UndefinedResults(TorchDispatchMode):
    """Notes why what an operator gives is not determined: it draws random numbers, from whatever generator, or reads what it is writing.

    PyTorch refuses the latter where it sees it, but not where an operand is expanded: ``x.index_add_(0, index, x.expand(5))``.
    """

    reason: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = func._schema.arguments
        given = {a.name: a.default_value for a in arguments} | dict(zip((a.name for a in arguments), args), **(kwargs or {}))
        # Attention that drops nothing draws nothing.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) != 0:
            self.reason = "it draws random numbers, which compiled code draws otherwise"
        tensors = {a: t for a in arguments if isinstance(t := given[a.name], torch.Tensor)}
        written = [t for a, t in tensors.items() if a.is_write]
        read = [t for a, t in tensors.items() if not a.is_write]
        # Pointwise operators and copies refuse operands that overlap in part, or by an offset.
        refuses = torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default
        if not refuses and any(shares_memory(w, r) for w in written for r in read):
            self.reason = "an operator reads memory that it is writing"
        return func(*args, **(kwargs or {}))


def _undefined(program: Program) -> str | None:
    """Why the program has no result that another order of computing must give too."""
    function, undefined = program.function(), _UndefinedResults()

    def noting(*inputs: Any) -> Any:
        with undefined:
            return function(*inputs)

    run(noting, program, "cpu", False)
    return undefined.reason


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Programs that warn or raise are expected: nothing is printed of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _predicted_strides(program: Program, device: str, got: list[Outcome]) -> set[str]:
    """The strides that PyTorch's fake tensors predict where eager has others. Inductor, which knows only these, has them too."""
    found = set()
    for second, have in zip(calls(program), got):
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = run(program.function(), program, device, second)
        for name, tensor in fake.tensors.items():
            ours = have.tensors.get(name)
            if tensor is not None and ours is not None and _same_strides(tensor, ours):
                found.add(f"{name} stride")
    return found


def _sensitivity(program: Program, device: str, exact: list[Outcome]) -> list[dict[str, float]]:
    """For each call, tensor -> the most that roundings of the inputs change it, in float64.

    A sum whose terms cancel is off by that much in whatever order it is computed. Eager's error alone does not tell: it may be small by
    chance, where there are few values, and a program in float64 has eager itself for its reference. 16-bit floats are left out, since
    their sums are rounded once.
    """
    eps, _ = _rounding(program)
    if eps > torch.finfo(torch.float32).eps:
        return []
    function = program.function(wide=True)
    found: list[dict[str, float]] = []
    for second, wide in zip(calls(program), exact):
        changes: dict[str, float] = {}
        for seed in range(NUDGES):
            for name, tensor in run(function, program, device, second, wide=True, nudge=(eps, seed)).tensors.items():
                other = wide.tensors.get(name)
                if tensor is None or other is None or tensor.shape != other.shape or not tensor.numel():
                    continue
                if tensor.is_floating_point() or tensor.is_complex():
                    change = (tensor.detach() - other.detach()).abs().nan_to_num(nan=0.0, posinf=0.0)
                    changes[name] = max(changes.get(name, 0.0), float(change.max()))
        found.append(changes)
    return found


@dataclasses.dataclass
class _Terms:
    """What is added up to one tensor.

    Attributes:
        overflow: where the sum of the terms' absolute values overflows: there some orders of the same sum do, and others do not.
        size: that sum in float64.
    """

    overflow: torch.Tensor
    size: torch.Tensor


def _terms(program: Program, device: str) -> list[dict[str, _Terms]]:
    """For each call, tensor -> its terms, as far as absolute values of inputs give those of terms: where nothing is subtracted, for one."""
    found = []
    for second in calls(program):
        narrow = run(program.function(), program, device, second, absolute=True).tensors
        wide = run(program.function(wide=True), program, device, second, wide=True, absolute=True).tensors
        found.append(
            {
                name: _Terms(~tensor.detach().isfinite(), size.detach().abs())
                for name, tensor in narrow.items()
                if tensor is not None and tensor.is_floating_point() and (size := wide.get(name)) is not None and size.shape == tensor.shape
            }
        )
    return found


def _differences(
    program: Program,
    expected: list[Outcome],
    exact: list[Outcome],
    got: list[Outcome],
    slack: Sequence[Mapping[str, float]] = (),
    terms: Sequence[Mapping[str, _Terms]] = (),
) -> dict[str, str]:
    """What differs -> how, in words. Each argument has an outcome a call; ``exact`` are those in float64, ``slack`` their sensitivity."""
    found: dict[str, str] = {}
    for number, (want, wide, have) in enumerate(zip(expected, exact, got)):
        if number and want.error:
            break  # the program does not exist with the second sizes
        where = f"call {number + 1}, " if len(got) > 1 else ""
        if have.error or want.error:
            if bool(have.error) != bool(want.error):
                found[f"{where}exception"] = f"{where}eager: {want.error or 'no exception'}; fuse: {have.error or 'no exception'}"
            continue
        known = {} if _no_reference(want, wide) else wide.tensors
        for name, tensor in want.tensors.items():
            bits = program.moves and not name.startswith("gradient")
            error = slack[number].get(name, 0.0) if slack else 0.0
            added = terms[number].get(name) if terms else None
            text = _difference(program, tensor, known.get(name), have.tensors.get(name), bits, error, added)
            if text:
                what = text.split(" ")[0]
                found[f"{name} {what}" if what == "stride" else f"{where}{name} {what}"] = f"{where}{name}: {text}"
        for name, aliases in want.aliases.items():
            if have.aliases[name] != aliases:
                found[f"{where}{name} memory"] = f"{where}{name} shares memory with {have.aliases[name]}, eager's with {aliases}"
    return found


def _no_reference(want: Outcome, wide: Outcome) -> str | None:
    """Why what the program computes in float64 says nothing of what it should compute."""
    if want.error:
        return None  # there is nothing to compare
    if wide.error:
        return f"in float64 it raises {wide.error}"
    shapes = [{name: t.shape for name, t in outcome.tensors.items() if t is not None} for outcome in (want, wide)]
    if shapes[0] != shapes[1]:  # x.to(f32).t_() turns x itself where that is no copy
        return "in float64 it has other shapes"
    return "in float64 it shares other memory" if wide.aliases != want.aliases else None


def _difference(program: Program, want: Any, wide: Any, have: Any, bits: bool, error: float, added: _Terms | None = None) -> str | None:
    if want is None or have is None:
        return None if want is have else f"presence: eager {want is not None}, fuse {have is not None}"
    for what in ("shape", "dtype", "device", "requires_grad"):
        if getattr(want, what) != getattr(have, what):
            return f"{what} {getattr(have, what)}, eager's {getattr(want, what)}"
    if not _same_strides(want, have):
        return f"stride {have.stride()}, eager's {want.stride()}"
    want, have = want.detach(), have.detach()
    if not (want.is_floating_point() or want.is_complex()):
        return None if torch.equal(want, have) else f"values: {int((want != have).sum())} of {want.numel()} differ"
    if bits:
        same = torch.equal(*(t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (want, have)))
        return None if same else "values: bits differ, though the program only moves data"
    return _error(program, want, wide, have, error, added)


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (not a.numel() or all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride()) if n > 1))


def _error(
    program: Program, want: torch.Tensor, wide: torch.Tensor | None, have: torch.Tensor, error: float, added: _Terms | None = None
) -> str | None:
    """How far ``have`` is off, if that is more than ``error`` and the error of eager's ``want`` allow; ``wide`` is the value in float64, if
    known."""
    if wide is None:
        return None
    double = torch.complex128 if want.is_complex() else torch.float64
    want, wide, have = want.to(double), wide.detach().to(double), have.to(double)
    # Inductor simplifies x * 0 to 0 even where x is infinite. float64 then gives no reference, so the value is its own.
    wide = torch.where(want.isfinite() & ~wide.isfinite(), want, wide)
    finite = wide.isfinite() & want.isfinite()
    eps, roundings = _rounding(program)
    size = wide.abs()
    if added is not None and added.size.shape == have.shape:
        size = added.size.to(have.device).maximum(size)
        have = torch.where(added.overflow.to(have.device) & ~have.isfinite(), want, have)
    # Where a number that is not too large overflows on its way in eager mode, another order may give it exactly, or the other infinity.
    exact = (have - wide).abs() <= roundings * eps * size
    no_reference = wide.isfinite() & (exact | ~have.isfinite())
    other = ~finite & ~((have == want) | (have.isnan() & want.isnan()) | no_reference)
    if other.any():
        i = other.nonzero()[0].tolist()
        return f"values: at {i} {have[tuple(i)].item()}, eager's {want[tuple(i)].item()}"
    if not finite.any():
        return None
    zero = torch.zeros((), dtype=torch.float64, device=want.device)
    eagers = torch.where(finite, (want - wide).abs(), zero).max()
    ours = torch.where(finite, (have - wide).abs(), zero).nan_to_num(nan=torch.inf)
    rounding = roundings * eps * torch.where(finite, wide.abs(), zero).max()
    bound = ERROR_RATIO * eagers.clamp(min=error) + rounding + torch.finfo(torch.float32).tiny + MANY_ROUNDINGS * _spacing(program)
    if (ours <= bound).all():
        return None
    i = (ours > bound).nonzero()[0].tolist()
    return (
        f"values: {int((ours > bound).sum())} of {ours.numel()} are off; at {i} {have[tuple(i)].item()},"
        f" eager's {want[tuple(i)].item()}, in float64 {wide[tuple(i)].item()}"
    )


def _rounding(program: Program) -> tuple[float, float]:
    """The rounding of the program's floating-point type of least precision, and how many of them are accepted."""
    least_precise = _least_precise(program)
    return torch.finfo(least_precise).eps, ROUNDINGS.get(least_precise, MANY_ROUNDINGS)


def _spacing(program: Program) -> float:
    """The distance of the smallest numbers of that type, 6e-8 in float16. Terms of a sum that are smaller vanish where they are rounded."""
    limits = torch.finfo(_least_precise(program))
    return limits.tiny * limits.eps


def _least_precise(program: Program) -> torch.dtype:
    text = program.source()
    used = {spec.dtype for spec in program.inputs} | {dtype for name, dtype in TYPES.items() if name in text}
    if program.autocast:
        used.add(torch.bfloat16)
    used = {torch.float32 if d == torch.complex64 else d for d in used if d.is_floating_point or d.is_complex} or {torch.float32}
    return max(used, key=lambda d: torch.finfo(d).eps)
