"""A family of substitutions: everything of it under one name, in one package. And where the families of this package are found."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import types

import torch

from fusebackend.log import log
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
        samples: the names of the operators that are rewritten, in PyTorch's OpInfo: tests run its samples of them.
    """

    name: str
    package: str
    patterns: tuple[Pattern, ...]
    operators: tuple[torch._ops.OpOverload, ...]
    samples: tuple[str, ...] = ()

    @property
    def bench(self) -> types.ModuleType:
        """``cases() -> list[Case]``, the family's table, and ``random_cases(draw, scale) -> Iterator[Case]``."""
        return self._module("bench")

    @property
    def fuzz(self) -> types.ModuleType:
        """``CORES``: functions that write one site of the family into a random program, or return False where it does not fit."""
        return self._module("fuzz")

    @property
    def sanitizer(self) -> types.ModuleType:
        """``launch_every_kernel()``, which calls the operators eagerly so that each CUDA kernel runs, and checks the results."""
        return self._module("sanitizer")

    def _module(self, name: str) -> types.ModuleType:
        return importlib.import_module(f"{self.package}.{name}")


@functools.cache
def families() -> dict[str, Family]:
    """The families that ship with this package, by name. One that can't be imported is logged and left out."""
    patterns = importlib.import_module("fusebackend.patterns")
    found: dict[str, Family] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(patterns.__path__)):
        try:
            family = importlib.import_module(f"{patterns.__name__}.{module}").FAMILY
            found.setdefault(family.name, family)
        except Exception:
            log.exception("the patterns of %s could not be loaded and are off", module)
    return found
