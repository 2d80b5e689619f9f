"""compute-sanitizer runs over every CUDA kernel: ``python -m fusebackend.tools.sanitizer``.

A family's ``launch_every_kernel`` (``patterns/<family>/sanitizer.py``) calls its operators at small shapes and checks their results with
the functions below. :mod:`fusebackend.tools.sanitizer.runner` runs them under the sanitizer's tools.
"""

from __future__ import annotations

import dataclasses
import re

import torch


@dataclasses.dataclass(frozen=True)
class KnownReport:
    """A report of racecheck that is known to be wrong (``KNOWN_REPORTS`` of a ``sanitizer.py``): one write in ``kernel``, and reads."""

    kernel: str
    reason: str  # the whole argument, or where it stands

    def covers(self, report: list[str]) -> bool:
        """Whether a report's lines are of one write in the kernel, and of reads in it."""
        names = rf"void (?:\w+::)*{self.kernel}[<(]"
        return bool(re.search(rf"Race reported between Write access at {names}", report[0])) and all(
            re.search(rf"and Read access at {names}", line) for line in report[1:]
        )


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A random CPU tensor: normal values, or integers from 0 to 99."""
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 100, shape).to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Asserts that ``found`` has the shape of ``exact``, a reference in double precision, and at most this relative error in norm."""
    found, exact = found.cpu().double(), exact.double()
    assert found.shape == exact.shape, (found.shape, exact.shape)
    error = (found - exact).norm() / exact.norm().clamp_min(1e-30)
    assert error <= tolerance, f"relative error {error:.1e}"


def tolerance(dtype: torch.dtype) -> float:
    """The relative error in norm that an operator's results may have; 0 for integers."""
    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 0.0)
