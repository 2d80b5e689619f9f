"""Runs a function eagerly in float64, eagerly, and with the pattern, and compares errors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from families.compiled_results import alike, whole_report

from fusebackend import backend
from fusebackend.report.model import Report

OPTIONS = {"fuse.patterns": ["sdpa"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}


def heads(*shape: int, keys: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """q, k and v of (batch, heads, tokens, D), with heads inside tokens in memory."""
    batch, count, queries, depth = shape or (2, 3, 9, 16)
    lengths = (queries, *[keys or queries] * 2)
    return [torch.randn(batch, n, count, depth).to(dtype).transpose(1, 2) for n in lengths]


def wide(args: tuple) -> tuple:
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


def compiled(fn: Callable, args: tuple, interpret: bool = True, **how) -> tuple[torch.Tensor, Report]:
    torch._dynamo.reset()
    options = {**OPTIONS, "fuse.interpret": interpret}
    result = torch.compile(fn, backend=backend.fuse, options=options, **how)(*args)
    return result, whole_report()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Normwise and relative; infinite where others are finite."""
    finite = exact.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    found, exact = found.double()[finite], exact.double()[finite]
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def check(fn: Callable, args: tuple, *, note: str = "", interpret: bool = True, roundings: float = 2.0, **how) -> Report:
    """Asserts that ``fn`` holds one attention, that the result has eager's shape, dtype and strides, and that it is no further from float64
    than eager's (in float32 by more than a twentieth), or than ``roundings`` of its dtype."""
    exact, eager = fn(*wide(args)), fn(*args)
    ours, report = compiled(fn, args, interpret, **how)
    assert len(report.substitutions) == 1, report
    assert note in report.substitutions[0].note, report
    assert alike(ours, eager)
    slack = 1.05 if ours.dtype == torch.float32 else 1.0
    bound = max(slack * error(eager, exact), roundings * torch.finfo(ours.dtype).eps / 2)
    assert error(ours, exact) <= bound, (error(ours, exact), error(eager, exact))
    return report


def refused(fn: Callable, args: tuple, reason: str) -> None:
    """Asserts that nothing is replaced in ``fn``, and that a near miss has this reason."""
    _, report = compiled(fn, args)
    assert not report.substitutions, report
    assert any(reason in r.reason for r in report.rejections), report
