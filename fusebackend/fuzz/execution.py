"""Runs a program, eagerly or compiled, and records everything that can be compared."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusebackend import backend
from fusebackend.fuzz.programs import Program


@dataclasses.dataclass
class Outcome:
    """The result of one call.

    Attributes:
        error: the exception, in a line.
        tensors: outputs, inputs after the call, and gradients, by what they are.
        aliases: output -> the inputs and earlier outputs that it shares memory with.
    """

    error: str | None = None
    tensors: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def calls(program: Program) -> tuple[bool, ...]:
    """For each call of the program, whether it is the one with the second sizes."""
    return (False, True, False) if program.path == "dynamic" else (False,)


def run(
    call: Callable,
    program: Program,
    device: str,
    second: bool,
    wide: bool = False,
    nudge: tuple[float, int] | None = None,
    absolute: bool = False,
) -> Outcome:
    """Calls ``call`` on the program's inputs, and computes the gradients.

    Args:
        call: the program, or what it was compiled to.
        second: with the second sizes.
        wide: with float64 (complex128) inputs.
        nudge: how far the inputs are off, as :meth:`fusebackend.fuzz.tensors.Spec.make` takes it; each input by other numbers.
        absolute: with the absolute values of inputs, and of what gradients are computed from.
    """
    outcome = Outcome()
    inputs, leaves = [], {}
    for i, spec in enumerate(program.specs(second)):
        tensor, leaf = spec.make(device, wide, nudge and (nudge[0], 1000 * nudge[1] + i), absolute)
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
            cotangents = [c.abs() for c in cotangents] if absolute else cotangents
            found = torch.autograd.grad(targets, list(leaves.values()), cotangents, allow_unused=True)
            dense = [f.to_dense() if f is not None and f.is_sparse else f for f in found]  # an embedding's may be sparse
            outcome.tensors.update(zip(leaves, dense))
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return outcome
    after = {f"x{i}": t for i, t in enumerate(inputs)}
    seen = dict(after)
    for name, output in named.items():
        outcome.aliases[name] = tuple(n for n, t in seen.items() if shares_memory(t, output))
        seen[name] = output
    outcome.tensors.update(named)
    outcome.tensors.update({f"{name} after the call": t for name, t in after.items()})
    return outcome


def run_compiled(program: Program, device: str, codegen: bool, patterns: Sequence[str] = ("all",)) -> tuple[list[Outcome], Counter]:
    """The outcomes of the program's calls with ``backend="fuse"``, and pattern -> substitutions.

    Args:
        codegen: through Inductor's code generation; otherwise the rewritten graph is interpreted.
    """
    options: dict[str, Any] = {
        "fuse.strict": True,
        "fuse.gate": program.gate,
        "fuse.interpret": not codegen,
        "fuse.patterns": list(patterns),
    }
    if (
        not codegen
    ):  # on GPUs Inductor pads operands of products, and only its generated code gives results the strides that they should have
        options["shape_padding"] = False
    backend.fuse.reset()  # type: ignore[attr-defined]
    if program.path == "direct":

        def call(*inputs):
            return backend.fuse(program.graph(inputs), list(inputs), options=options)(*inputs)

    else:
        torch._dynamo.reset()
        call = torch.compile(program.function(), backend=backend.fuse, options=options, fullgraph=True)
    outcomes = [run(call, program, device, second) for second in calls(program)]
    counts: Counter = Counter()
    for report in backend.reports():
        counts.update(report.counts())
    return outcomes, counts


def _cotangent(output: torch.Tensor, i: int) -> torch.Tensor:
    """Small integers; for every second output expanded, as the backward of a sum gives them."""
    generator = torch.Generator().manual_seed(i)
    values = torch.randint(-2, 3, (output.numel(),), generator=generator).reshape(output.shape)
    if i % 2:
        values = values[..., :1].expand_as(values)
    return values.to(output.device, output.dtype)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
