"""Tensors of any memory layout, made from a description that can be written into a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

#: What a tensor is filled with: name -> which values. Only the index fills use ``bound``.
FILLS = {
    "integers": "small integers, whose sums and products are exact in any order",
    "normal": "normally distributed",
    "special": "normally distributed, with infinities, NaNs, signed zeros and denormal numbers",
    "scales": "normally distributed, times a power of ten each: from below the normal numbers to where products overflow",
    "zeros": "zeros",
    "index": "uniform in [0, bound)",
    "signed index": "uniform in [-bound, bound)",
    "one index": "bound - 1 everywhere",
    "sorted index": "uniform in [0, bound), ascending",
    "bad index": "uniform in [0, bound), except the last, which is bound or, with an odd seed, -1",
}

_SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-7)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One input of a program.

    Attributes:
        shape, dtype: of the tensor.
        order: the dims from outermost to innermost in memory; () is row-major.
        gaps: pairs of a dim and the number of elements by which the buffer is longer along it, as after a slice.
        step: the stride of the innermost dim, in elements.
        offset: the storage offset, in elements.
        expanded: the dims of stride 0.
        overlap: all strides are 1, as ``unfold`` may return: elements share memory.
        fill: a key of :data:`FILLS`.
        bound: the number of rows that an index refers to.
        seed: of the values.
        grad: ``"leaf"``: requires grad; ``"inner"``: is computed from a leaf that does, and may be mutated; None: does not.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    order: tuple[int, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    step: int = 1
    offset: int = 0
    expanded: tuple[int, ...] = ()
    overlap: bool = False
    fill: str = "normal"
    bound: int = 0
    seed: int = 0
    grad: str | None = None

    def strides(self) -> tuple[int, ...]:
        if self.overlap:
            return (1,) * len(self.shape)
        strides, stride, gaps = [0] * len(self.shape), self.step, dict(self.gaps)
        for dim in reversed(self.order or range(len(self.shape))):
            if dim not in self.expanded:
                strides[dim] = stride
                stride *= max(self.shape[dim] + gaps.get(dim, 0), 1)
        return tuple(strides)

    @property
    def reaches_no_row(self) -> bool:
        """Whether these are indices, none of which is in range, since there are no rows."""
        return self.fill == "zeros" and not self.bound and 0 not in self.shape and not self.dtype.is_floating_point

    def resized(self, sizes: Mapping[int, int]) -> Spec:
        """The same with the sizes and the bound that ``sizes`` maps replaced, and another seed."""
        shape = tuple(sizes.get(n, n) for n in self.shape)
        return dataclasses.replace(self, shape=shape, bound=sizes.get(self.bound, self.bound), seed=self.seed + 1000)

    def make(
        self, device: torch.device | str = "cpu", widen: bool = False, nudge: tuple[float, int] | None = None, absolute: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensor, and the leaf whose gradient can be computed, if any.

        Args:
            widen: in float64 (complex128).
            nudge: a relative size, and a seed: each value is off by up to that much, except for integers, which all types hold exactly.
            absolute: the absolute values of floating-point numbers.
        """
        strides = self.strides()
        extent = 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, strides))
        base = self._values(self.offset + extent).to(device)
        if widen and (base.is_floating_point() or base.is_complex()):
            base = base.to(torch.complex128 if base.is_complex() else torch.float64)
        if self.fill != "integers":
            base = nudged(base, nudge)
        if absolute and base.is_floating_point():
            base = base.abs()
        if self.grad == "inner":
            leaf = base.requires_grad_()
            return (leaf * 1).as_strided(self.shape, strides, self.offset), leaf
        tensor = base.as_strided(self.shape, strides, self.offset)
        return (tensor, tensor.requires_grad_()) if self.grad else (tensor, None)

    def _values(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if "index" in self.fill:
            low = -self.bound if self.fill == "signed index" else 0
            drawn = torch.randint(low, max(self.bound, low + 1), (count,), generator=generator)
            if self.fill == "one index":
                drawn.fill_(max(self.bound - 1, 0))
            if self.fill == "sorted index":
                drawn = drawn.sort().values
            if self.fill == "bad index":
                drawn[-1:] = -1 if self.seed % 2 else self.bound
            return drawn.to(self.dtype)
        if self.dtype == torch.bool:
            return torch.randint(0, 2, (count,), generator=generator).bool()
        if self.fill == "zeros":
            return torch.zeros(count, dtype=self.dtype)
        if self.fill == "integers" or not (self.dtype.is_floating_point or self.dtype.is_complex):
            low = 0 if self.dtype == torch.uint8 else -4
            return torch.randint(low, 5, (count,), generator=generator).to(self.dtype)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        drawn = torch.randn(count, dtype=wide, generator=generator)
        if self.fill == "scales":
            smallest, largest = (-7, 4) if self.dtype == torch.float16 else (-41, 38)
            drawn *= 10.0 ** torch.randint(smallest, largest + 1, (count,), generator=generator)
        if self.fill == "special" and count:
            where = torch.randperm(count, generator=generator)[: 1 + count // 8]  # distinct: of two writes to one element, either may win
            which = torch.randint(0, len(_SPECIAL), where.shape, generator=generator)
            drawn[where] = torch.tensor(_SPECIAL, dtype=wide)[which]
        return drawn.to(self.dtype)

    def source(self) -> str:
        """A Python expression for this object, without the fields that have their defaults."""
        parts = [repr(self.shape), str(self.dtype)]
        for field in dataclasses.fields(self)[2:]:
            value: Any = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"Spec({', '.join(parts)})"


def nudged(values: torch.Tensor, nudge: tuple[float, int] | None) -> torch.Tensor:
    """Floats, each off by up to a relative size, by random numbers of a seed: both in ``nudge``. Integers, or without one, as they are."""
    if nudge is None or not (values.is_floating_point() or values.is_complex()):
        return values
    size, seed = nudge
    drawn = torch.rand(values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(values.device)
    return values * (1 + size * (2 * drawn - 1)).to(values.real.dtype)
