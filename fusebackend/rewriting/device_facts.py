"""What descriptions of work may know of a device."""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """A GPU: its name, its compute capability, and how many multiprocessors it has."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


#: Of the GPU that tests without one imagine: an H200.
IMAGINED = DeviceFacts("NVIDIA H200", (9, 0), 132)


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a CUDA device. Fake tensors may be on one where there is none."""
    if not torch.cuda.is_available():
        return IMAGINED
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, (properties.major, properties.minor), properties.multi_processor_count)
