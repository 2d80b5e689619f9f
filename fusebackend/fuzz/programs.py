"""A program: its inputs, its lines of PyTorch, how it is run, and the file that it is saved to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusebackend.fuzz.tensors import Spec

#: The names of floating-point dtypes in programs. For the reference in float64 the same lines run with all of them float64.
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        inputs: x0, x1, ...
        body: lines of Python over x0, x1, ...
        outputs: the names that are returned.
        path: ``"direct"`` traces the function and hands the graph to the backend: one static graph, as Dynamo makes it, without its
            bytecode analysis and guards, which take half the time. ``"dynamo"`` goes through torch.compile. ``"dynamic"`` does too, with
            every size marked dynamic, and calls a second time with ``sizes``.
        sizes: for ``"dynamic"``: size -> that of the second call.
        gate: ``fuse.gate``. ``"off"`` applies every legal match, so that more is substituted than by default.
        deterministic: run under torch.use_deterministic_algorithms(True).
        autocast: run under torch.autocast to bf16.
        moves: the program only moves data, so that even the bits of NaNs must agree.
        kinds: the unusual things that were drawn, as the result of a run counts them.
    """

    inputs: tuple[Spec, ...]
    body: tuple[str, ...]
    outputs: tuple[str, ...]
    path: str = "direct"
    sizes: tuple[tuple[int, int], ...] = ()
    gate: str = "off"
    deterministic: bool = False
    autocast: bool = False
    moves: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def training(self) -> bool:
        return any(spec.grad for spec in self.inputs)

    def source(self) -> str:
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        lines = [*self.body, f"return {', '.join(self.outputs)},"]
        return f"def program({names}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self, wide: bool = False) -> Callable:
        """The program as a function. With ``wide`` it computes in float64 throughout."""
        names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **TYPES}
        if wide:
            names.update(dict.fromkeys(TYPES, torch.float64))
        exec(compile(self.source(), "<fuzzed program>", "exec"), names)
        return names["program"]

    def graph(self, inputs: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
        """The graph that the direct path hands to the backend."""
        return torch.fx.symbolic_trace(self.function())

    def specs(self, second: bool = False) -> tuple[Spec, ...]:
        """The inputs of a call; with ``second`` those of the call with the second sizes."""
        return tuple(spec.resized(dict(self.sizes)) for spec in self.inputs) if second else self.inputs

    @contextlib.contextmanager
    def context(self, device: str) -> Iterator[None]:
        """The global settings that the program runs under."""
        was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=self.autocast):
                yield
        finally:
            torch.use_deterministic_algorithms(was)

    def file(self, comment: str, device: str, codegen: bool) -> str:
        """The text of a Python file that runs :func:`fusebackend.fuzz.compare.check` on the program and prints what differs."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:] if getattr(self, f.name) != f.default}
        settings = "".join(f"    {name}={value!r},\n" for name, value in fields.items())
        body = "".join(f"        {line!r},\n" for line in self.body)
        inputs = "".join(f"        {spec.source()},\n" for spec in self.inputs)
        return f'''"""{comment}

{self.source()}"""

import torch
from fusebackend.fuzz.compare import check
from fusebackend.fuzz.programs import Program
from fusebackend.fuzz.tensors import Spec

PROGRAM = Program(
    inputs=(
{inputs}    ),
    body=(
{body}    ),
    outputs={self.outputs!r},
{settings})

if __name__ == "__main__":
    comparison = check(PROGRAM, device={device!r}, codegen={codegen!r})
    raise SystemExit(str(comparison) if comparison.wrong else 0)
'''
