"""Errors to fp64 are at most 1.2 times eager's, in every one of many random convolutions.

There is no floor below which errors do not count. With few results rounding errors are a matter of chance, so there the results of the
kernels are bit-identical to eager's, or correctly rounded. ``FUSEBACKEND_ERROR_CASES=1000`` runs so many cases on each device.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator

import pytest
import torch
from one_convolution import Case

from fusebackend.patterns.causal_conv1d.ops import reference

CASES = {"cpu": 200, "cuda": 500}
PARTS = 10
MARGIN = 1.2


pytestmark = pytest.mark.usefixtures("library")


@dataclasses.dataclass(frozen=True)
class Error:
    """That of a result's worst row: of its norm, and of its largest element, relative to the row's scale."""

    norm: float
    largest: float


def draw_spec(draw: random.Random, device: str) -> tuple[tuple, dict]:
    """The arguments of a random ``Case``."""
    lengths = [1, 2, 31, 64, 129, 768, 1134, draw.randint(1, 40), draw.randint(1, 300), draw.randint(300, 2048)]
    length = draw.choice(lengths + [2048, 8192] * (device == "cuda"))
    taps = draw.choice([1, 2, 3, 4, 4, draw.randint(5, 64), draw.randint(5, 64), draw.randint(65, 1024), length, length])
    left = draw.choice([taps - 1, taps - 1, taps - 1, taps // 2, 0, draw.randint(0, taps + 3)])
    out = draw.choice([length, length, max(1, length - taps + 1), draw.randint(max(1, length // 2), length + left)])
    batch, channels = draw.choice([1, 2, 3, 8, 11, 32]), draw.choice([1, 2, 3, 8, 40, 64])
    while batch * channels * length * taps > (4e9 if device == "cuda" else 2e7) and batch * channels > 1:
        batch, channels = (batch + 1) // 2, (channels + 1) // 2
    dtype = draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    flags = {name: draw.random() < 0.5 for name in ("channels_last", "silu", "bias")}
    return (batch, channels, length, taps, dtype), {"left": left, "out": out, "shift": 0.0, **flags}


def build_case(spec: tuple[tuple, dict], device: str) -> Case:
    return Case(*spec[0], device, **spec[1])


def scales(case: Case) -> list[torch.Tensor]:
    """Of each element of the results: the root of the sum of the squares of the terms that it is a sum of."""
    squares = [None if t is None else t.double().square() for t in (case.x, case.weight, case.bias)]
    leaves = [t.requires_grad_() for t in squares if t is not None]
    bias = squares[2]
    y = reference(squares[0], squares[1], bias, case.left, max(case.right, 0))[..., : case.grad.shape[2]]
    return [t.detach().sqrt() for t in (y, *torch.autograd.grad(y, leaves, case.grad.double().square()))]


def error(got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> Error:
    rows = [t.reshape(-1, t.shape[-1]).double() for t in (got - exact, scale)]
    difference, scale = rows
    assert not difference[scale.amax(-1) == 0].any(), "sums of zeros are zero"
    norm = (difference.norm(dim=-1) / scale.norm(dim=-1).clamp_min(1e-300)).max()
    return Error(norm.item(), (difference.abs().amax(-1) / scale.amax(-1).clamp_min(1e-300)).max().item())


def errors(case: Case) -> Iterator[tuple[str, Error, Error]]:
    """(result, ours, eager's) for out, dx, dw and, with a bias, db."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        results = zip(("out", "dx", "dw", "db"), case.ours(), case.torchs(case.x.dtype), case.torchs(), scales(case))
    for name, ours, eagers, exact, scale in results:
        yield name, error(ours, exact, scale), error(eagers, exact, scale)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_errors_are_at_most_1_2_times_eagers(device, part):
    draw = random.Random(part)
    ratios = []
    for i in range(int(os.environ.get("FUSEBACKEND_ERROR_CASES", CASES[device])) // PARTS):
        torch.manual_seed(i)
        case = build_case(draw_spec(draw, device), device)
        ulp = torch.finfo(case.x.dtype).eps
        for name, ours, eagers in errors(case):
            which = f"case {i}: {name} of {tuple(case.x.shape)}, {case.weight.shape[2]} taps, {case.x.dtype}"
            for kind in ("norm", "largest"):
                got, limit = getattr(ours, kind), getattr(eagers, kind)
                assert got <= MARGIN * limit, f"{which}: {kind} {got / ulp:.4f} ulp, eager's {limit / ulp:.4f}"
            ratios.append(ours.norm / eagers.norm if eagers.norm else 1.0)
    ratios.sort()
    assert ratios[len(ratios) // 2] <= 1.0 + 1e-6, "the median is no worse than eager's"
