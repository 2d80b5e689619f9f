"""A random program in the making: its inputs and lines are drawn with hypothesis, one after another.

Each line is executed on real tensors when it is added, so that the next line knows the shapes and dtypes that there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from fusebackend.fuzz.programs import TYPES
from fusebackend.fuzz.tensors import Spec

T = TypeVar("T")

#: The sizes of dims. Small and odd ones, multiples of vectors, and sizes beside these; those that shrink best stand first.
SIZES = (3, 2, 5, 8, 4, 16, 17, 33, 7, 40, 64, 65, 100, 130, 9, 24, 3, 2, 5, 8, 4, 16, 17, 33, 7, 40, 64, 31, 96, 1, 1, 0)

#: No value has more elements.
MAX_ELEMENTS = 20_000

#: A line whose value is larger is dropped: 16-bit floats would overflow in one order of operations and not in another.
MAX_VALUE = 1e4

#: The dtypes that have no name in a program's source (:data:`fusebackend.fuzz.programs.TYPES`).
_OTHER_TYPES = {
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "c64": torch.complex64,
    "bool": torch.bool,
}

_integers = functools.lru_cache(None)(st.integers)


class Builder:
    """A program in the making.

    Attributes:
        inputs: the inputs so far, called x0, x1, ...
        body: the lines so far.
        values: name -> its tensor; the inputs, and the results v0, v1, ... of lines.
        results: the names that hold what the families' cores computed.
        dtype: of new inputs, by default.
        moves: whether all lines so far only move data.
        training: whether inputs may require grad.
        special: whether inputs hold infinities and NaNs, or numbers of all magnitudes.
        exact: whether inputs hold small integers.
        dynamic: whether the program is to run with other sizes too.
        kinds: the unusual things that were drawn.
        tries_bad_index: whether an index out of range would tell more than usual.
    """

    def __init__(self, draw: Any):
        self._draw = draw
        self.inputs: list[Spec] = []
        self.body: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        self.results: list[str] = []
        self.moves = True
        self.training = self.chance(50)
        self.kinds: set[str] = set()
        self.tries_bad_index = False
        self.special = self.chance(12)
        self.exact = not self.special and self.chance(25)
        self.dynamic = self.chance(5)
        names = ("f32",) * 6 + ("f64",) + ("bf16", "f16") * 2
        type_name = self.pick(names if self.training or self.chance(85) else ("i64", "i32", "i16", "i8", "u8", "c64", "bool", *names))
        self.dtype = {**TYPES, **_OTHER_TYPES}[type_name]
        self._names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **TYPES}

    # ---- draws ----

    def integer(self, low: int, high: int) -> int:
        return self._draw(_integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options. Shrinks towards the first."""
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        """True with that probability. Shrinks towards False."""
        return self.integer(0, 99) >= 100 - percent

    def size(self) -> int:
        return self.pick(SIZES)

    def note(self, kind: str) -> None:
        """Counts the program among those of this kind."""
        self.kinds.add(kind)

    def shape(self, dims: int) -> tuple[int, ...]:
        """A random shape of that rank, of at most ``MAX_ELEMENTS`` elements."""
        shape: list[int] = []
        for _ in range(dims):
            size = self.size()
            most = MAX_ELEMENTS // max(math.prod(shape), 1)
            shape.append(size if size <= most else max(1, min(most, 3)))
        if 0 in shape or 1 in shape:
            self.note("size 0" if 0 in shape else "size 1")
        return tuple(shape)

    def long_shape(self) -> tuple[int, ...]:
        """A random shape of more dims than most kernels take; so few of them longer than 1 that two such tensors may broadcast."""
        self.note("many dims")
        shape = [1] * self.integer(8, 20)
        for _ in range(self.integer(2, 8)):
            shape[self.integer(0, len(shape) - 1)] = self.pick((2, 2, 3))
        return tuple(shape)

    def permutation(self, dims: int) -> tuple[int, ...]:
        remaining, order = list(range(dims)), []
        while remaining:
            order.append(remaining.pop(self.integer(0, len(remaining) - 1)))
        return tuple(reversed(range(dims))) if self.chance(30) else tuple(order)

    def number(self) -> str:
        """A random factor, as it stands in the source."""
        if self.special and self.chance(50):
            self.note("huge factor")
            return self.pick(("1e12", "1e-12", "1e30", "-1e-30", "float('inf')", "float('nan')", "1e-320", "1e300", "-0.0"))
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return self.pick(("2", "-1", "0.5", "1.5", "0", "-3.25", "1"))
        return self.pick(("2", "1", "3", "0")) if self.dtype == torch.uint8 else self.pick(("2", "-1", "3", "0", "1"))

    # ---- inputs ----

    def input(self, shape: Sequence[int], dtype: torch.dtype | None = None, *, plain: bool = False, **fields: Any) -> str:
        """A new input, of any memory layout or row-major if ``plain``. ``fields`` are fields of its ``Spec``. Returns its name."""
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
        if "fill" not in fields:
            fields["fill"] = self.pick(("special", "scales")) if self.special else "integers" if self.exact else "normal"
            if self.special:
                self.note(f"{fields['fill']} values")
        if not shape:
            self.note("0-d tensor")
        if self.training and dtype.is_floating_point and "grad" not in fields:
            fields["grad"] = self.pick(("leaf", "leaf", None, "inner"))
        spec = Spec(shape, dtype, seed=len(self.inputs), **fields)
        name = f"x{len(self.inputs)}"
        self.inputs.append(spec)
        self._names[name] = self.values[name] = spec.make()[0]
        return name

    def index(self, count: Sequence[int], bound: int, *, signed: bool = False) -> str:
        """A new input of indices into ``bound`` rows; ``signed`` allows indices that count from the end."""
        fill = self.pick(("index", "index", "sorted index", "one index") + (("signed index",) if signed else ()))
        dtype = torch.int32 if self.chance(20) else torch.int64
        return self.input(count, dtype, fill=fill if bound else "zeros", bound=bound, plain=not self.chance(15))

    def operand(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
        """A value of this shape and dtype: with even odds an existing one, if one fits, else a new input."""
        shape, dtype = tuple(shape), dtype or self.dtype
        fitting = [n for n, v in self.values.items() if tuple(v.shape) == shape and v.dtype == dtype]
        return self.pick(fitting[::-1]) if fitting and self.chance(50) else self.input(shape, dtype)

    def value(self, dims: Sequence[int] = (), dtype: torch.dtype | None = None) -> str | None:
        """Some value of one of these ranks and of that dtype (any by default); None if there is none. Shrinks towards the last."""
        fitting = [n for n, v in self.values.items() if (not dims or v.dim() in dims) and (dtype is None or v.dtype == dtype)]
        return self.pick(fitting[::-1]) if fitting else None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[name]

    def size_of(self, size: int) -> str:
        """A size as it stands in the source: that of an input's dim, if the program is to run with other sizes too, else a number."""
        if self.dynamic:
            for i, spec in enumerate(self.inputs):
                if size in spec.shape:
                    return f"x{i}.shape[{spec.shape.index(size)}]"
        return str(size)

    # ---- lines ----

    def emit(self, expression: str, *, moves: bool = False) -> str | None:
        """Adds ``v = expression`` and returns v's name; or adds nothing and returns None, if the expression raises or is too large.

        Args:
            moves: the line only moves data.
        """
        name = f"v{len(self.body)}"
        try:
            value = eval(expression, self._names)
        except Exception:  # eager refuses it
            return None
        if not isinstance(value, torch.Tensor) or value.numel() > MAX_ELEMENTS or self._too_large(value):
            return None
        self.body.append(f"{name} = {expression}")
        self._names[name] = self.values[name] = value
        self.moves &= moves
        return name

    def do(self, statement: str, *, moves: bool = False) -> bool:
        """Adds a line that mutates a value, and returns whether it was added.

        It is not where elements of an input share memory: PyTorch can't always tell, and the result is that of a race.
        """
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
        return bool(value.detach().abs().max() > MAX_VALUE)
