"""A program: its inputs, its lines of PyTorch, how it is run, and the file it is saved to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from fusebackend.fuzz.tensors import Spec

#: The names that programs have for floating-point dtypes. Their wide twin, which is what errors are measured against,
#: runs the same lines with float64 for all of them.
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Program:
    """One random program.

    Attributes:
        inputs: x0, x1, ...
        body: lines of Python over x0, x1, ...
        outputs: the names that are returned.
        path: ``"direct"`` hands the traced function straight to the backend, which is what Dynamo does and costs half;
            ``"dynamo"`` goes through torch.compile; ``"dynamic"`` too, with every size marked dynamic, and runs ``sizes`` next.
        sizes: for ``"dynamic"``: size -> the second call's.
        ignore_cost: guards that ask what pays are off, so that more is substituted.
        deterministic: under torch.use_deterministic_algorithms(True).
        autocast: under torch.autocast to bf16.
        moves: nothing is computed, so that even the bits of NaNs must agree.
    """

    inputs: tuple[Spec, ...]
    body: tuple[str, ...]
    outputs: tuple[str, ...]
    path: str = "direct"
    sizes: tuple[tuple[int, int], ...] = ()
    ignore_cost: bool = True
    deterministic: bool = False
    autocast: bool = False
    moves: bool = False

    @property
    def training(self) -> bool:
        return any(spec.grad for spec in self.inputs)

    def source(self) -> str:
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        lines = [*self.body, f"return {', '.join(self.outputs)},"]
        return f"def program({names}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self, wide: bool = False) -> Callable:
        """The program as a function; the wide one computes in float64 throughout."""
        names = {"torch": torch, "F": torch.nn.functional, **TYPES}
        if wide:
            names.update(dict.fromkeys(TYPES, torch.float64))
        exec(compile(self.source(), "<fuzzed program>", "exec"), names)
        return names["program"]

    def graph(self, inputs: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
        """What is handed to the backend on the direct path."""
        return torch.fx.symbolic_trace(self.function())

    def specs(self, second: bool = False) -> tuple[Spec, ...]:
        return tuple(spec.resized(dict(self.sizes)) for spec in self.inputs) if second else self.inputs

    @contextlib.contextmanager
    def context(self, device: str) -> Iterator[None]:
        """The settings that it runs under."""
        was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=self.autocast):
                yield
        finally:
            torch.use_deterministic_algorithms(was)

    def file(self, comment: str, device: str, codegen: bool) -> str:
        """A Python file that runs the program both ways and says what differs."""
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
    verdict = check(PROGRAM, device={device!r}, codegen={codegen!r})
    raise SystemExit(str(verdict) if verdict.wrong else 0)
'''
