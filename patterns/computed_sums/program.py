"""Programs: what the kernels compute of each element, which they add or store, as text that is an argument of the operators.

    t0=sub(i0,i1);t1=mul(i2,t0);out(i2);out(t1)

gives input 2, and its product with the difference of inputs 0 and 1. A statement names a result ``tK``, K = 0, 1, ... in order, or gives
one of the results that are added or stored, in order; arguments are results, inputs ``iK``, or numbers as Python writes them. All
arithmetic is fp32; comparisons give truth values.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

import torch

#: How many inputs and sums a program may have: what the kernels hold in registers.
MOST_INPUTS, MOST_SUMS = 16, 4

_STATEMENT = re.compile(r"(?:t(\d+)=)?([a-z]\w*)\(([^()]*)\)")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)")


def _rounded(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


#: What may be computed: how many arguments it takes, and the same in PyTorch.
FUNCTIONS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    **{name: (2, getattr(torch, name)) for name in ("add", "sub", "mul", "div", "maximum", "minimum", "pow")},
    **{name: (2, getattr(torch, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: (1, getattr(torch, name)) for name in ("neg", "abs", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal")},
    **{name: (1, getattr(torch, name)) for name in ("sigmoid", "tanh", "erf", "sin", "cos", "relu", "square")},
    "where": (3, torch.where),
    "and": (2, torch.logical_and),
    "or": (2, torch.logical_or),
    "not": (1, torch.logical_not),
    "bf16": (1, _rounded(torch.bfloat16)),
    "fp16": (1, _rounded(torch.float16)),
}

#: Functions of truth values alone, and those that give some. Of ``where`` the first argument is one. All else are numbers: the kernels
#: refuse one where the other is wanted.
_OF_TRUTH_VALUES = frozenset({"and", "or", "not"})
_TRUTH_VALUES = _OF_TRUTH_VALUES | {"lt", "le", "gt", "ge", "eq", "ne"}


@dataclasses.dataclass(frozen=True)
class Statement:
    """A function of arguments, whose result the next statements may use; or, with the name ``"out"``, what a sum is of."""

    name: str
    arguments: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def parse(program: str, inputs: int, sums: int) -> tuple[Statement, ...]:
    """The statements of a program for so many inputs and sums.

    Raises:
        ValueError: it is malformed; the message names the statement, and what is accepted.
    """
    if not 1 <= inputs <= MOST_INPUTS or not 1 <= sums <= MOST_SUMS:
        raise ValueError(f"1 to {MOST_INPUTS} inputs and 1 to {MOST_SUMS} sums are accepted, not {inputs} and {sums}")
    statements: list[Statement] = []
    results = outs = 0
    for text in program.split(";"):
        found = _STATEMENT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} in a program: tK=name(arguments) or out(argument) is accepted")
        number, name, arguments = found[1], found[2], tuple(found[3].split(","))
        accepted = 1 if name == "out" else FUNCTIONS.get(name, (None,))[0]
        if accepted is None:
            raise ValueError(f"{text!r} in a program: there is no function {name!r}; {', '.join(FUNCTIONS)} are accepted")
        if len(arguments) != accepted:
            raise ValueError(f"{text!r} in a program: {name} takes {accepted} arguments, not {len(arguments)}")
        if (number is None) != (name == "out") or (number is not None and int(number) != results):
            raise ValueError(f"{text!r} in a program: results are t0, t1, ... in order, and a sum has none")
        for argument in arguments:
            if not _is_known(argument, inputs, results):
                raise ValueError(f"{text!r} in a program: {argument!r} is no number, none of {inputs} inputs and no earlier result")
        results, outs = results + (name != "out"), outs + (name == "out")
        statements.append(Statement(name, arguments))
    if outs != sums:
        raise ValueError(f"a program of {outs} sums for {sums} types")
    return tuple(statements)


def check_types(program: str, inputs: Sequence[torch.dtype], sums: int) -> None:
    """Refuses numbers where truth values are wanted, and truth values where numbers are, as the kernels do.

    Raises:
        ValueError: a statement has such an argument; the message names both.
    """
    truths = {f"i{k}" for k, dtype in enumerate(inputs) if dtype is torch.bool}
    results = 0
    for statement in parse(program, len(inputs), sums):
        for n, argument in enumerate(statement.arguments):
            if (argument in truths) != _wants_truth(statement.name, n):
                wanted, given = ("a number", "a truth value") if argument in truths else ("a truth value", "a number")
                raise ValueError(f"argument {n} of {statement.name} in a program is {wanted}, and {argument!r} is {given}")
        if statement.name in _TRUTH_VALUES:
            truths.add(f"t{results}")
        results += statement.name != "out"


def _wants_truth(name: str, argument: int) -> bool:
    return name in _OF_TRUTH_VALUES or (name == "where" and argument == 0)


def _is_known(argument: str, inputs: int, results: int) -> bool:
    if argument[:1] in ("i", "t") and argument[1:].isdecimal():
        return int(argument[1:]) < (inputs if argument[0] == "i" else results)
    return _NUMBER.fullmatch(argument) is not None


def evaluate(program: str, inputs: Sequence[torch.Tensor], sums: int) -> list[torch.Tensor]:
    """What is summed, by PyTorch: in fp64 where an input is fp64, in fp32 otherwise."""
    wide = torch.float64 if torch.float64 in {t.dtype for t in inputs} else torch.float32
    values = {f"i{k}": t if t.dtype is torch.bool else t.to(wide) for k, t in enumerate(inputs)}
    device = inputs[0].device
    outs = []

    def value(argument: str) -> torch.Tensor:
        return values[argument] if argument in values else torch.tensor(float(argument), dtype=wide, device=device)

    results = 0
    for statement in parse(program, len(inputs), sums):
        arguments = [value(a) for a in statement.arguments]
        if statement.name == "out":
            outs.append(arguments[0].to(wide))
        else:
            values[f"t{results}"] = FUNCTIONS[statement.name][1](*arguments)
            results += 1
    return outs


class Writer:
    """Writes a program. A statement that was written before is not written again.

    Attributes:
        truths: the names of inputs and results that are truth values. Where a function wants a number these are 1 and 0, and numbers but
            0 are true, as in PyTorch.
    """

    def __init__(self) -> None:
        self.truths: set[str] = set()
        self._results: dict[str, str] = {}
        self._statements: list[str] = []

    def call(self, name: str, *arguments: str) -> str:
        """The name of the result of a function."""
        arguments = tuple(self.truth(a) if _wants_truth(name, n) else self.number(a) for n, a in enumerate(arguments))
        text = f"{name}({','.join(arguments)})"
        if text not in self._results:
            self._results[text] = f"t{len(self._results)}"
            self._statements.append(f"{self._results[text]}={text}")
            if name in _TRUTH_VALUES:
                self.truths.add(self._results[text])
        return self._results[text]

    def number(self, argument: str) -> str:
        """The name of an argument as a number."""
        return self.call("where", argument, "1.0", "0.0") if argument in self.truths else argument

    def truth(self, argument: str) -> str:
        """The name of an argument as a truth value."""
        return argument if argument in self.truths else self.call("ne", argument, "0.0")

    def out(self, argument: str) -> None:
        self._statements.append(f"out({self.number(argument)})")

    def __len__(self) -> int:
        return len(self._results)

    def __str__(self) -> str:
        return ";".join(self._statements)
