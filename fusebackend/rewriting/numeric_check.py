"""``options={"fuse.check": "numeric"}``: runs the original region beside each substitution and keeps the errors.

It is for finding the substitution behind a wrong number: both forms run, so it costs their time and memory together.
"""

from __future__ import annotations

import collections
import dataclasses

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops


@dataclasses.dataclass
class SiteError:
    """The errors found at one substitution.

    Attributes:
        site: pattern, graph, and the user's line.
        calls: how often it ran.
        absolute: the largest difference between replacement and original.
        relative: the largest difference over the original's largest value.
    """

    site: str
    calls: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        return f"{self.site}: largest error {self.absolute:.2e} absolute, {self.relative:.2e} of the largest value ({self.calls} calls)"


_pending: collections.deque[tuple[str, torch.Tensor, torch.Tensor]] = collections.deque()
_errors: dict[str, SiteError] = {}


def _check(replacement: torch.Tensor, original: torch.Tensor) -> None:
    same = arguments.same_sizes(replacement.shape, original.shape) and replacement.dtype == original.dtype
    torch._check(same, lambda: f"numeric_check: {g.spec(replacement)} replaces {g.spec(original)}")
    arguments.check_device("numeric_check", original, replacement=replacement)


def _fake(replacement: torch.Tensor, original: torch.Tensor, site: str) -> torch.Tensor:
    _check(replacement, original)
    return torch.empty_like(replacement)


def _compare(replacement: torch.Tensor, original: torch.Tensor, site: str) -> torch.Tensor:
    _check(replacement, original)
    if replacement.numel() and (replacement.is_floating_point() or replacement.is_complex()):
        kind = torch.complex128 if replacement.is_complex() else torch.float64
        both_nan = replacement.isnan() & original.isnan()
        # Infinities of one sign subtract to nan: equal values have no difference.
        error = (replacement.to(kind) - original.to(kind)).abs().masked_fill(both_nan | (replacement == original), 0).max()
        _pending.append((site, error, original.to(kind).abs().nan_to_num(0, 0, 0).max()))
    else:
        difference = (replacement != original).any() if replacement.numel() else torch.zeros((), dtype=torch.bool)
        _pending.append((site, difference.double(), torch.ones((), dtype=torch.float64)))
    return replacement.clone(memory_format=torch.preserve_format)


compare = ops.define(
    "numeric_check(Tensor replacement, Tensor original, str site) -> Tensor",
    fake=_fake,
    python_kernels={"CompositeExplicitAutograd": _compare},
    layout=ops.UNPADDED,
    tags=(torch.Tag.cudagraph_unsafe,),
)


def numeric_errors() -> list[SiteError]:
    """The errors found so far, by site. Waits for the device; :func:`reset` clears them."""
    while _pending:  # another thread may add some meanwhile
        site, error, scale = _pending.popleft()
        found = _errors.setdefault(site, SiteError(site))
        found.calls += 1
        absolute = error.item()
        found.absolute = max(found.absolute, absolute) if absolute == absolute else float("nan")
        found.relative = max(found.relative, absolute / max(scale.item(), 1e-300)) if absolute else found.relative
    return list(_errors.values())


def reset() -> None:
    """Forgets the errors found so far."""
    _pending.clear()
    _errors.clear()
