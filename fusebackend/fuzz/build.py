"""Draws random programs with hypothesis, line by line: each line is run on real tensors as it is added, so that the
next one knows what it may do."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from fusebackend.fuzz.programs import TYPES, Program
from fusebackend.fuzz.tensors import Spec
from fusebackend.native import loader
from fusebackend.rewriting.registry import families

T = TypeVar("T")

SIZES = (3, 2, 5, 8, 4, 16, 17, 33, 7, 40, 64, 65, 100, 130, 9, 24, 3, 2, 5, 8, 4, 16, 17, 33, 7, 40, 64, 31, 96, 1, 1, 0)
SECOND = (6, 9, 11, 12, 13, 21, 34, 48, 66, 71)
CAP = 20_000  # elements
LARGEST = 1e4  # beyond it a line is dropped: 16-bit floats would overflow in one order of operations and not in another

_integers = functools.lru_cache(None)(st.integers)


class Builder:
    """A program in the making.

    Attributes:
        dtype: what new inputs are by default.
        values: name -> the tensor that it holds now; inputs and results of lines.
        results: what the families' cores came to.
    """

    def __init__(self, draw: Any):
        self._draw = draw
        self.inputs: list[Spec] = []
        self.body: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        self.results: list[str] = []
        self.moves = True
        self.training = self.chance(50)
        self.special = self.chance(6)
        self.exact = not self.special and self.chance(25)
        self.dynamic = self.chance(5)
        names = ("f32",) * 6 + ("f64",) + ("bf16", "f16") * 2
        self.type_name = self.pick(names if self.training or self.chance(85) else ("i64", "i32", "i16", "i8", "u8", "c64", "bool", *names))
        self.dtype = {
            **TYPES,
            "i64": torch.int64,
            "i32": torch.int32,
            "i16": torch.int16,
            "i8": torch.int8,
            "u8": torch.uint8,
            "c64": torch.complex64,
            "bool": torch.bool,
        }[self.type_name]
        self._names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **TYPES}

    # ---- draws ----

    def integer(self, low: int, high: int) -> int:
        return self._draw(_integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options; shrinks towards the first."""
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        """Shrinks towards False."""
        return self.integer(0, 99) >= 100 - percent

    def size(self) -> int:
        return self.pick(SIZES)

    def shape(self, dims: int) -> tuple[int, ...]:
        """Sizes, some of them equal, of a tensor that is not too large."""
        shape: list[int] = []
        for _ in range(dims):
            size = self.size()
            room = CAP // max(math.prod(shape), 1)
            shape.append(size if size <= room else max(1, min(room, 3)))
        return tuple(shape)

    def permutation(self, dims: int) -> tuple[int, ...]:
        left, order = list(range(dims)), []
        while left:
            order.append(left.pop(self.integer(0, len(left) - 1)))
        return tuple(reversed(range(dims))) if self.chance(30) else tuple(order)

    def number(self) -> str:
        """A factor in the source."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return self.pick(("2", "-1", "0.5", "1.5", "0", "-3.25", "1"))
        return self.pick(("2", "1", "3", "0")) if self.dtype == torch.uint8 else self.pick(("2", "-1", "3", "0", "1"))

    # ---- inputs ----

    def input(self, shape: Sequence[int], dtype: torch.dtype | None = None, *, plain: bool = False, **fields: Any) -> str:
        """A new input of any memory layout (row-major if ``plain``); returns its name."""
        shape, dtype = tuple(shape), dtype or self.dtype
        dims = len(shape)
        if not plain:
            kind = self.integer(0, 11)
            if kind in (4, 5, 6):
                fields["order"] = self.permutation(dims)
            if kind in (6, 7) and dims:
                fields["gaps"] = ((self.integer(0, dims - 1), self.integer(1, 4)),)
            if kind == 8:
                fields["step"] = 2
            if kind in (7, 9):
                fields["offset"] = self.integer(1, 5)
            if kind == 10 and dims:
                fields["expanded"] = (self.integer(0, dims - 1),)
            if kind == 11 and dims == 2:
                fields["overlap"] = True
        fields.setdefault("fill", "special" if self.special else "integers" if self.exact else "normal")
        if self.training and dtype.is_floating_point and "grad" not in fields:
            fields["grad"] = self.pick(("leaf", "leaf", None, "inner"))
        spec = Spec(shape, dtype, seed=len(self.inputs), **fields)
        name = f"x{len(self.inputs)}"
        self.inputs.append(spec)
        self._names[name] = self.values[name] = spec.make()[0]
        return name

    def index(self, count: Sequence[int], bound: int, *, signed: bool = False) -> str:
        """An input of indices into ``bound`` rows."""
        fill = self.pick(("index", "index", "sorted index", "one index") + (("signed index",) if signed else ()))
        dtype = torch.int32 if self.chance(20) else torch.int64
        return self.input(count, dtype, fill=fill if bound else "zeros", bound=bound, plain=not self.chance(15))

    def operand(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        """A value of this shape: one that is there, if one fits and chance wants it, or a new input."""
        shape, dtype = tuple(shape), dtype or self.dtype
        there = [n for n, v in self.values.items() if tuple(v.shape) == shape and v.dtype == dtype]
        return self.pick(there[::-1]) if there and self.chance(50) else self.input(shape, dtype)

    def value(self, dims: Sequence[int] = (), dtype: torch.dtype | None = None) -> str | None:
        """Some value of that many dims and that dtype, preferably a late one; None if there is none."""
        fitting = [n for n, v in self.values.items() if (not dims or v.dim() in dims) and (dtype is None or v.dtype == dtype)]
        return self.pick(fitting[::-1]) if fitting else None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[name]

    def size_of(self, size: int) -> str:
        """A size in the source: of an input, if the program is to run with other sizes too."""
        if self.dynamic:
            for i, spec in enumerate(self.inputs):
                if size in spec.shape:
                    return f"x{i}.shape[{spec.shape.index(size)}]"
        return str(size)

    # ---- lines ----

    def emit(self, expression: str, *, moves: bool = False) -> str | None:
        """Adds ``v = expression``; returns v's name, or None, and adds nothing, if eager refuses it or its value is
        too large. ``moves``: the line only moves data."""
        name = f"v{len(self.body)}"
        try:
            value = eval(expression, self._names)
        except Exception:  # whatever eager objects to
            return None
        if not isinstance(value, torch.Tensor) or value.numel() > CAP or self._too_large(value):
            return None
        self.body.append(f"{name} = {expression}")
        self._names[name] = self.values[name] = value
        self.moves &= moves
        return name

    def do(self, statement: str, *, moves: bool = False) -> bool:
        """Adds a line that mutates something; whether eager takes it. Where elements share memory (PyTorch can't always tell),
        the result is that of a race."""
        if any(spec.overlap for spec in self.inputs):
            return False
        try:
            exec(statement, self._names)
        except Exception:
            return False
        self.body.append(statement)
        self.moves &= moves
        return True

    def _too_large(self, value: torch.Tensor) -> bool:
        if self.special or not value.is_floating_point() or not value.numel():
            return False
        return bool(value.detach().abs().max() > LARGEST)


def _second_sizes(b: Builder) -> tuple[tuple[int, int], ...]:
    sizes = sorted({n for spec in b.inputs for n in spec.shape if n > 1})
    return tuple((n, SECOND[(i + b.integer(0, 3)) % len(SECOND)] + 100 * (i // len(SECOND))) for i, n in enumerate(sizes))


@functools.cache
def _cores(device: str) -> tuple[Callable[[Builder], bool | None], ...]:
    """The families' cores; four times each of a family that has kernels on this kind of device."""
    cores: list[Callable[[Builder], bool | None]] = []
    for family in families().values():
        has_kernels = loader.load().why_not(torch.device(device), *family.operators) is None
        cores += [*family.fuzz.CORES] * (4 if has_kernels else 1)
    return tuple(cores)


@st.composite
def programs(draw: Any, device: str = "cpu") -> Program:
    """Random programs for ``device``: one or two of the families' cores, with other lines before, between and behind.
    They are tried on the CPU, where what eager refuses raises and does no harm."""
    from fusebackend.fuzz.steps import step

    b = Builder(draw)
    settings = Program((), (), (), deterministic=b.chance(6), autocast=b.chance(5))
    with settings.context("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(b.pick((1, 1, 1, 2))):
            for _ in range(b.pick((0, 0, 0, 1, 2))):
                step(b)
            cores = _cores(device)
            first = b.integer(0, len(cores) - 1)
            for core in (*cores[first:], *cores[:first]):
                if core(b) is not False:  # it fits this program
                    break
            b.results += [n for n in list(b.values)[-1:] if n.startswith("v")]
        for _ in range(b.pick((0, 0, 1, 2, 4))):
            step(b)
    made = [n for n in b.values if n.startswith("v")] or list(b.values)
    outputs = [n for n in b.results if b.chance(90)] or [made[-1]]
    for _ in range(b.pick((0, 1, 2, 3))):
        outputs.append(b.pick(made if b.chance(85) else list(b.values)))
    path = "dynamic" if b.dynamic else "dynamo" if b.chance(4) else "direct"
    if device == "cpu" and b.chance(4):  # on CUDA an assertion ends the process
        b.inputs = [dataclasses.replace(s, fill="bad index") if s.fill == "index" else s for s in b.inputs]
    return Program(
        inputs=tuple(b.inputs),
        body=tuple(b.body),
        outputs=tuple(outputs),
        path=path,
        sizes=_second_sizes(b) if path == "dynamic" else (),
        ignore_cost=not b.chance(25),
        deterministic=settings.deterministic,
        autocast=settings.autocast,
        moves=b.moves,
    )
