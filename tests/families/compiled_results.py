"""What a compile gave: its reports as one, and whether a result is laid out as eager's."""

from __future__ import annotations

import torch

from fusebackend import backend
from fusebackend.report.model import Report


def whole_report() -> Report:
    """Of all graphs since Dynamo was reset."""
    report = Report()
    for part in backend.reports():
        report.extend(part)
    return report


def alike(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether dtype, shape and strides agree, but for those of dims of size 1."""
    strides = all(a == b for a, b, size in zip(mine.stride(), theirs.stride(), mine.shape) if size != 1)
    return mine.dtype == theirs.dtype and mine.shape == theirs.shape and strides
