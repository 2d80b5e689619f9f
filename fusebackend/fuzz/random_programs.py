"""Random programs around the families, as a strategy of hypothesis."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from fusebackend.fuzz.builder import Builder
from fusebackend.fuzz.imagined_gpu import IMAGINED_DEVICE
from fusebackend.fuzz.programs import Program
from fusebackend.fuzz.steps import step
from fusebackend.native import loader
from fusebackend.rewriting.registry import families

#: Writes one site of a family into a program, or returns False where it does not fit.
Core = Callable[[Builder], bool | None]

#: The sizes of the second call of a program that is compiled with dynamic shapes.
SECOND_SIZES = (6, 9, 11, 12, 13, 21, 34, 48, 66, 71)


def _second_sizes(b: Builder) -> tuple[tuple[int, int], ...]:
    """Each size of the program's inputs, with the size that replaces it in the second call."""
    sizes = sorted({n for spec in b.inputs for n in spec.shape if n > 1})
    return tuple((n, SECOND_SIZES[(i + b.integer(0, 3)) % len(SECOND_SIZES)] + 100 * (i // len(SECOND_SIZES))) for i, n in enumerate(sizes))


@functools.cache
def _cores(device: str) -> tuple[Core, ...]:
    """The families' cores. Those of a family with kernels on this kind of device are in it four times, and so drawn more often."""
    cores: list[Core] = []
    for family in families().values():
        has_kernels = device == IMAGINED_DEVICE or loader.load().why_not(torch.device(device), *family.operators) is None
        cores += [*family.fuzz.CORES] * (4 if has_kernels else 1)
    return tuple(cores)


@st.composite
def programs(draw: Any, device: str = "cpu") -> Program:
    """Random programs for ``device``: one or two of the families' cores, with other lines before, between and after them.

    They are built by running them on the CPU, where what eager refuses raises an exception and does no harm.
    """
    b = Builder(draw)
    settings = Program((), (), (), deterministic=b.chance(6), autocast=b.chance(5))
    with settings.context("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(b.pick((1, 1, 2, 2))):
            for _ in range(b.pick((0, 0, 0, 1, 2))):
                step(b)
            cores = _cores(device)
            first = b.integer(0, len(cores) - 1)
            for core in (*cores[first:], *cores[:first]):
                if core(b) is not False:  # False: it does not fit this program
                    break
            b.results += [n for n in list(b.values)[-1:] if n.startswith("v")]
        for _ in range(b.pick((0, 0, 1, 2, 4))):
            step(b)
    made = [n for n in b.values if n.startswith("v")] or list(b.values)
    outputs = [n for n in b.results if b.chance(90)] or [made[-1]]
    for _ in range(b.pick((0, 1, 2, 3))):
        outputs.append(b.pick(made if b.chance(85) else list(b.values)))
    path = "dynamic" if b.dynamic else "dynamo" if b.chance(4) else "direct"
    if device != "cuda" and b.chance(40 if b.tries_bad_index else 4):  # on CUDA a device-side assertion would end the process
        b.note("bad index")
        b.inputs = [dataclasses.replace(s, fill="bad index") if s.fill == "index" else s for s in b.inputs]
    return Program(
        inputs=tuple(b.inputs),
        body=tuple(b.body),
        outputs=tuple(outputs),
        path=path,
        sizes=_second_sizes(b) if path == "dynamic" else (),
        gate="auto" if b.chance(25) else "off",
        deterministic=settings.deterministic,
        autocast=settings.autocast,
        moves=b.moves,
        kinds=tuple(sorted(b.kinds)),
    )
