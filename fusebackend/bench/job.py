"""A job: something to compile and then to time, and what can go wrong with it."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fusebackend.bench.rows import Row

#: How often a call that ran out of memory is repeated, and the seconds before each repetition.
MEMORY_RETRIES, MEMORY_PAUSE = 5, 3


class Job(Protocol):
    """Something to compile and time. It is pickled for a worker process, so it names what it needs, and imports it there."""

    @property
    def names(self) -> dict[str, str]:
        """The keys that identify its row, with their values."""

    @property
    def weight(self) -> int:
        """Jobs of greater weight are started first: those that take longest to compile."""

    def prepare(self, device: torch.device) -> Callable[[], Row]:
        """Compiles everything, and returns the function that measures."""


@dataclasses.dataclass
class Failure:
    """Why a job has no row: an exception's type and text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The first two lines of an exception's text: Dynamo's errors name the backend in the first and the reason in the second."""
        return cls(type(error).__name__, " ".join(str(error).split("\n")[:2]).strip())

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the GPU's memory was exhausted: PyTorch's allocator says so by the exception's type, CUDA and compilers by its text."""
        return self.kind == torch.OutOfMemoryError.__name__ or "out of memory" in self.text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def attempt(call: Callable, *arguments: Any) -> Any:
    """``call(*arguments)``, or the :class:`Failure` that it ended with."""
    try:
        return call(*arguments)
    except Exception as error:
        return Failure.of(error)


def retry_out_of_memory(call: Callable, *arguments: Any) -> Any:
    """``call(*arguments)``, repeated while other processes hold too much of the GPU's memory for a moment."""
    for _ in range(MEMORY_RETRIES):
        try:
            return call(*arguments)
        except Exception as error:
            if not Failure.of(error).is_out_of_memory:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(MEMORY_PAUSE)
    return call(*arguments)
