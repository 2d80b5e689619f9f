"""The cases of a family: its table, or random shapes."""

from __future__ import annotations

import random

import torch

from fusebackend.bench.case import Case
from fusebackend.rewriting.registry import families

#: On a CPU random cases have this part of the bytes and operations that they have on a GPU.
CPU_SCALE = 1 / 64


def table_cases(family: str) -> list[Case]:
    """The cases of a family's table.

    Raises:
        ValueError: two of them have the same name.
    """
    cases = families()[family].bench.cases()
    if len({case.name for case in cases}) < len(cases):
        raise ValueError(f"{family}: two cases have the same name, among {', '.join(case.name for case in cases)}")
    return cases


def random_cases(family: str, count: int, seed: int) -> list[Case]:
    """``count`` different random cases of a family. The same seed gives the same cases on every machine of the same kind."""
    found: dict[str, Case] = {}
    drawn = families()[family].bench.random_cases(random.Random(seed), 1.0 if torch.cuda.is_available() else CPU_SCALE)
    while len(found) < count:
        case = next(drawn)
        found.setdefault(case.name, case)
    return list(found.values())
