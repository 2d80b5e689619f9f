"""What descriptions of work may know of a device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """A GPU.

    Attributes:
        name, capability, multiprocessors: its name, its compute capability, and how many multiprocessors it has.
        shared_bytes, block_shared_bytes: the shared memory of a multiprocessor, and the most that a block may have.
        l2_bytes: its L2 cache.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    block_shared_bytes: int
    l2_bytes: int

    def why_not(self, block_shared_bytes: int) -> str | None:
        """Why it runs no kernels for compute capability 8.0 whose blocks need so much shared memory; None if it does."""
        if self.capability[0] < 8:
            return "a GPU of compute capability 8.0 or later is needed, this one has {}.{}".format(*self.capability)
        if self.block_shared_bytes < block_shared_bytes:
            return f"a GPU with {block_shared_bytes} bytes of shared memory a block is needed, this one has {self.block_shared_bytes}"
        return None


#: Of the GPU that tests without one imagine: an H200.
IMAGINED = DeviceFacts("NVIDIA H200", (9, 0), 132, 228 << 10, 227 << 10, 50 << 20)


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a CUDA device. Fake tensors may be on one where there is none."""
    if not torch.cuda.is_available():
        return IMAGINED
    p: Any = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        p.name,
        (p.major, p.minor),
        p.multi_processor_count,
        p.shared_memory_per_multiprocessor,
        p.shared_memory_per_block_optin,
        p.L2_cache_size,
    )
