"""Runs a program eagerly, in float64 and with ``backend="fuse"``, and says what differs.

What is compared: every output's values, shape, dtype, strides, storage offset and which inputs and outputs it shares
memory with; every input after the call; the gradients; and whether there is an exception. A value is wrong where its
error against float64 is several times eager's own (and more than rounding of the result); what only moves data must
agree in every bit. A difference counts only if there is one to the same compile without substitutions, too: what Inductor
itself makes of a program (it may turn an exception or a stride into another) is not ours to change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusebackend import backend
from fusebackend import fx_utils as g
from fusebackend.fuzz.programs import TYPES, Program

#: How many times eager's error (its largest over a tensor) is accepted, and how many roundings of the largest value.
ERROR_RATIO, ROUNDINGS = 4.0, {torch.float16: 2, torch.bfloat16: 2}
_MANY_ROUNDINGS = 16  # of float32 and float64, whose sums are long


@dataclasses.dataclass
class Outcome:
    """What a run gave: an exception, or tensors by what they are, and who shares memory with whom."""

    error: str | None = None
    tensors: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Verdict:
    """What :func:`check` found.

    Attributes:
        wrong: differences that are ours, in words.
        inductors: how many differences Inductor has without us.
        counts: pattern -> substitutions.
        skipped: why the program says nothing (eager raises while its inputs are made, say).
    """

    wrong: list[str] = dataclasses.field(default_factory=list)
    inductors: int = 0
    counts: Counter = dataclasses.field(default_factory=Counter)
    skipped: str | None = None

    def __str__(self) -> str:
        return "\n".join(self.wrong) or "no difference"


def check(program: Program, device: str = "cpu", codegen: bool = False) -> Verdict:
    """Compares ``program`` with eager; ``codegen`` through Inductor's own code generation, otherwise interpreted."""
    verdict = Verdict()
    with _quiet(), program.context(device), torch.random.fork_rng(devices=[]):
        if device != "cpu":  # where an index out of range, say, would end the process
            tried = [_run(program.function(), program, "cpu", second).error for second in _calls(program)]
            if any(tried):
                verdict.skipped = next(filter(None, tried))
                return verdict
        expected = [_run(program.function(), program, device, second) for second in _calls(program)]
        if expected[0].error and "bad index" not in {spec.fill for spec in program.inputs}:
            verdict.skipped = expected[0].error
            return verdict
        exact = [_run(program.function(wide=True), program, device, second, wide=True) for second in _calls(program)]
        got, verdict.counts = _compiled(program, device, codegen)
        found = _differences(program, expected, exact, got)
        if found:
            plain, _ = _compiled(program, device, codegen, patterns=())
            ours = _differences(program, plain, exact, got).keys() - _predicted(program, device, got)
            verdict.wrong = [text for what, text in found.items() if what in ours]
            verdict.inductors = len(found) - len(verdict.wrong)
    return verdict


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Programs that raise are part of it: nobody needs to read of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _calls(program: Program) -> tuple[bool, ...]:
    """Whether each call is the one with the second sizes."""
    return (False, True, False) if program.path == "dynamic" else (False,)


# ---- runs ----


def _run(call: Callable, program: Program, device: str, second: bool, wide: bool = False) -> Outcome:
    outcome = Outcome()
    inputs, leaves = [], {}
    for i, spec in enumerate(program.specs(second)):
        tensor, leaf = spec.make(device, wide)
        inputs.append(tensor)
        if leaf is not None:
            leaves[f"gradient of x{i}"] = leaf
    if program.path == "dynamic":
        for tensor in inputs:
            for d in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, d)
    try:
        outputs = call(*inputs)
        named = {f"output {i}": o for i, o in enumerate(outputs)}
        targets = [o for o in named.values() if o.requires_grad and o.is_floating_point()]
        if leaves and targets:
            cotangents = [_cotangent(o, i) for i, o in enumerate(targets)]
            found = torch.autograd.grad(targets, list(leaves.values()), cotangents, allow_unused=True)
            found = [f.to_dense() if f is not None and f.is_sparse else f for f in found]  # of an embedding
            outcome.tensors.update(zip(leaves, found))
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return outcome
    inputs = {f"x{i}": t for i, t in enumerate(inputs)}
    seen = dict(inputs)
    for name, output in named.items():
        outcome.aliases[name] = tuple(n for n, t in seen.items() if _shares(t, output))
        seen[name] = output
    outcome.tensors.update(named)
    outcome.tensors.update({f"{name} after the call": t for name, t in inputs.items()})
    return outcome


def _cotangent(output: torch.Tensor, i: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(i)
    values = torch.randint(-2, 3, (output.numel(),), generator=generator).reshape(output.shape)
    if i % 2:
        values = values[..., :1].expand_as(values)  # as the backward of a sum gives it
    return values.to(output.device, output.dtype)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _compiled(program: Program, device: str, codegen: bool, patterns: Sequence[str] = ("all",)) -> tuple[list[Outcome], Counter]:
    options = {"fuse.strict": True, "fuse.gate": "off", "fuse.interpret": not codegen, "fuse.patterns": list(patterns)}
    fn = program.function()
    backend.fuse.reset()
    with cost_ignored() if program.ignore_cost else contextlib.nullcontext():
        if program.path == "direct":
            # What Dynamo does, without its bytecode analysis and its guards: one static graph.
            def call(*inputs):
                return backend.fuse(program.graph(inputs), list(inputs), options=options)(*inputs)

        else:
            torch._dynamo.reset()
            call = torch.compile(fn, backend=backend.fuse, options=options, fullgraph=True)
        outcomes = [_run(call, program, device, second) for second in _calls(program)]
    counts: Counter = Counter()
    for report in backend.reports():
        counts.update(report.counts())
    return outcomes, counts


@contextlib.contextmanager
def cost_ignored() -> Iterator[None]:
    """Guards that ask what pays, not what is right, let everything pass: so more is substituted, in more places."""
    from fusebackend.patterns.fp32_matmul import match as matmul
    from fusebackend.patterns.permute import match as permute
    from fusebackend.patterns.transpose_add import match as transpose_add

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(g, "fused_neighbour", lambda node: None))
        stack.enter_context(mock.patch.object(matmul, "pays", lambda *sizes: True))
        stack.enter_context(mock.patch.object(matmul, "LEAST_K", 0))
        stack.enter_context(mock.patch.object(transpose_add, "_loses", lambda out: None))
        stack.enter_context(mock.patch.object(permute, "_loses", lambda *site: None))
        yield


def _predicted(program: Program, device: str, got: list[Outcome]) -> set[str]:
    """Strides that PyTorch's fake tensors have where eager has others: Inductor, which knows only those, has them too."""
    found = set()
    for second, have in zip(_calls(program), got):
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = _run(program.function(), program, device, second)
        for name, tensor in fake.tensors.items():
            if tensor is not None and have.tensors.get(name) is not None and _same_strides(tensor, have.tensors[name]):
                found.add(f"{name} stride")
    return found


# ---- differences ----


def _differences(program: Program, expected: list[Outcome], exact: list[Outcome], got: list[Outcome]) -> dict[str, str]:
    """What differs -> how, in words."""
    found: dict[str, str] = {}
    for number, (want, wide, have) in enumerate(zip(expected, exact, got)):
        if number and want.error:
            break  # the program does not exist with the second sizes
        where = f"call {number + 1}, " if len(got) > 1 else ""
        if have.error or want.error:
            if bool(have.error) != bool(want.error):
                found[f"{where}exception"] = f"{where}eager: {want.error or 'no exception'}; fuse: {have.error or 'no exception'}"
            continue
        for name, tensor in want.tensors.items():
            bits = program.moves and not name.startswith("gradient")
            text = _difference(program, tensor, wide.tensors.get(name), have.tensors.get(name), bits)
            if text:
                what = text.split(" ")[0]
                found[f"{name} {what}" if what == "stride" else f"{where}{name} {what}"] = f"{where}{name}: {text}"
        for name, aliases in want.aliases.items():
            if have.aliases[name] != aliases:
                found[f"{where}{name} memory"] = f"{where}{name} shares memory with {have.aliases[name]}, eager's with {aliases}"
    return found


def _difference(program: Program, want: Any, wide: Any, have: Any, bits: bool) -> str | None:
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
    return _error(program, want, wide, have)


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (not a.numel() or all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride()) if n > 1))


def _error(program: Program, want: torch.Tensor, wide: torch.Tensor | None, have: torch.Tensor) -> str | None:
    """How far ``have`` is off, if it is further than eager's ``want`` allows; ``wide`` is the same in float64."""
    if wide is None or wide.shape != want.shape:
        wide = want
    double = torch.complex128 if want.is_complex() else torch.float64
    want, wide, have = want.to(double), wide.detach().to(double), have.to(double)
    # Inductor takes x * 0 for 0, also where x is infinite: what there is to compare with is then its own value.
    wide = torch.where(want.isfinite() & ~wide.isfinite(), want, wide)
    finite = wide.isfinite() & want.isfinite()
    other = ~finite & ~((have == want) | (have.isnan() & want.isnan()))
    if other.any():
        i = other.nonzero()[0].tolist()
        return f"values: at {i} {have[tuple(i)].item()}, eager's {want[tuple(i)].item()}"
    if not finite.any():
        return None
    zero = torch.zeros((), dtype=torch.float64, device=want.device)
    eagers = torch.where(finite, (want - wide).abs(), zero).max()
    ours = torch.where(finite, (have - wide).abs(), zero).nan_to_num(nan=torch.inf)
    eps, roundings = _rounding(program)
    bound = ERROR_RATIO * eagers + roundings * eps * torch.where(finite, wide.abs(), zero).max() + torch.finfo(torch.float32).tiny
    if (ours <= bound).all():
        return None
    i = (ours > bound).nonzero()[0].tolist()
    return (
        f"values: {int((ours > bound).sum())} of {ours.numel()} are off; at {i} {have[tuple(i)].item()},"
        f" eager's {want[tuple(i)].item()}, in float64 {wide[tuple(i)].item()}"
    )


def _rounding(program: Program) -> tuple[float, float]:
    """The rounding of the coarsest floating-point type of the program, and how many of them are accepted."""
    text = program.source()
    used = {spec.dtype for spec in program.inputs} | {dtype for name, dtype in TYPES.items() if name in text}
    if program.autocast:
        used.add(torch.bfloat16)
    used = {torch.float32 if d == torch.complex64 else d for d in used if d.is_floating_point or d.is_complex} or {torch.float32}
    coarsest = max(used, key=lambda d: torch.finfo(d).eps)
    return torch.finfo(coarsest).eps, ROUNDINGS.get(coarsest, _MANY_ROUNDINGS)
