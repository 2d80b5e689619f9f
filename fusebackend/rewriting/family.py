"""A family of substitutions: everything of it under one name, in one package."""

from __future__ import annotations

import dataclasses
import importlib
import types

import torch

from fusebackend.rewriting.pattern import Pattern


@dataclasses.dataclass(frozen=True)
class Family:
    """What ships under one name. Each package in ``fusebackend.patterns`` defines one, called ``FAMILY``.

    The modules below are imported when they are asked for: a compile needs none of them.

    Attributes:
        name: the family's name, the same in ``patterns/``, ``csrc/`` and ``tests/families/``.
        package: the package that defines it (its ``__name__``).
        patterns: what is looked for in graphs.
        operators: what matches are replaced by.
    """

    name: str
    package: str
    patterns: tuple[Pattern, ...]
    operators: tuple[torch._ops.OpOverload, ...]

    @property
    def bench(self) -> types.ModuleType:
        """``cases() -> list[Case]``, the family's table, and ``random_cases(draw, scale) -> Iterator[Case]``."""
        return self._module("bench")

    @property
    def fuzz(self) -> types.ModuleType:
        """``CORES``, functions that write one site of the family into a random program, or return False where it does not fit."""
        return self._module("fuzz")

    @property
    def sanitizer(self) -> types.ModuleType:
        """``launch_every_kernel()``, which calls the operators eagerly so that each CUDA kernel runs, and checks the results."""
        return self._module("sanitizer")

    def _module(self, name: str) -> types.ModuleType:
        return importlib.import_module(f"{self.package}.{name}")
