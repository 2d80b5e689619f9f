"""Runs a function eagerly in float64, eagerly, and with the pattern, and compares errors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from families.compiled_results import alike, whole_report

from fusebackend import backend
from fusebackend.report.model import Report

OPTIONS = {"fuse.patterns": ["attention"], "fuse.interpret": True, "fuse.gate": "off", "fuse.strict": True}


LOWEST = torch.finfo(torch.bfloat16).min
LOWEST_IN_WIDE = torch.finfo(torch.float32).min


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def heads(batch: int = 2, count: int = 4, queries: int = 9, keys: int | None = None, depth: int = 16, **kwargs) -> list[torch.Tensor]:
    """q, k and v."""
    lengths = (queries, *[queries if keys is None else keys] * 2)
    return [randn(batch, count, length, depth, **kwargs) for length in lengths]


def visible(*shape: int) -> torch.Tensor:
    """Which keys are seen: the first always is."""
    mask = torch.rand(*shape) < 0.6
    mask[..., 0] = True
    return mask


def alibi_of_keys(slope):
    return (torch.arange(9).view(1, 1, 9) * torch.pow(slope, torch.arange(1, 5)).view(4, 1, 1))[None]


def run(fn: Callable, args: tuple, training: bool) -> list[torch.Tensor]:
    """The result of ``fn`` and, in training, the gradients of the arguments that require them."""
    leaves = [a.detach().clone().requires_grad_(training and a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    with torch.set_grad_enabled(training):
        out = fn(*leaves)
    if not training:
        return [out]
    wanted = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
    generator = torch.Generator().manual_seed(7)
    cotangent = torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent)]


def wide(args: tuple) -> tuple:
    return tuple(
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    )


def compiled(fn: Callable, args: tuple, training: bool, interpret: bool = True) -> tuple[list[torch.Tensor], Report]:
    torch._dynamo.reset()
    options = {**OPTIONS, "fuse.interpret": interpret}
    results = run(torch.compile(fn, backend=backend.fuse, options=options), args, training)
    return results, whole_report()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Normwise and relative."""
    return ((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def check(
    fn: Callable, args: tuple, *, training: bool, count: int = 1, exact: Callable | None = None, interpret: bool = True, slack: float = 1.0
) -> Report:
    """Asserts that ``fn`` holds ``count`` attentions, that results have eager's shapes, dtypes and strides, and that none is further from
    float64 than eager's, or than two roundings of its dtype.

    Args:
        exact: what is run in float64, where that is not ``fn``.
        interpret: without code generation.
        slack: how many times eager's error is allowed, where most of it is that of other operators.
    """
    reference = run(exact or fn, wide(args), training)
    eager = run(fn, args, training)
    ours, report = compiled(fn, args, training, interpret)
    assert len(report.substitutions) == count, report
    for precise, theirs, mine in zip(reference, eager, ours, strict=True):
        assert alike(mine, theirs)
        assert error(mine, precise) <= max(slack * error(theirs, precise), torch.finfo(mine.dtype).eps), (
            error(mine, precise),
            error(theirs, precise),
        )
    return report


def refused(fn: Callable, args: tuple, reason: str, *, training: bool, code: str | None = None) -> None:
    """Asserts that nothing is replaced in ``fn``, and that a near miss has this reason."""
    ours, report = compiled(fn, args, training)
    assert not report.substitutions, report
    found = [r for r in report.rejections if reason in r.reason and code in (None, r.code)]
    assert found, report
    torch.testing.assert_close(ours[0], run(fn, args, training)[0], rtol=0.05, atol=0.05, equal_nan=True)
