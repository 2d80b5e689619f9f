"""What a family brings along to be timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        name: what is done on which shape, e.g. ``"bf16 24300x11520"``; unique in its family.
        fn: ordinary PyTorch, which the backend is expected to rewrite. It may change its arguments in place.
        inputs: makes the arguments, on a device; the same ones after the same ``torch.manual_seed``.
        floor: a call on the same arguments that moves the same bytes in the simplest way; what can't be beaten.
        goal: the largest ratio to the floor that we want: short for ``goals={"floor": goal}``.
        goals: column -> the largest ratio of our time to it that we want; ``"ms"`` -> our largest time in ms. Columns are
            ``"floor"``, the ways of :data:`fusebackend.bench.kernels.WAYS` and ``peers``.
        peers: more columns: name -> what prepares a peer from the arguments and returns the call, without arguments, that
            is timed.
        backward: positions of the inputs whose gradients are asked for. If there are any, the backward of ``fn`` alone is
            timed in place of ``fn``.
        deterministic: compiled and timed under ``torch.use_deterministic_algorithms``.
        flops: floating-point operations of one call, for a rate.
        ways: the only ways that say something new; all if empty. Compiling is what takes the time of a long list of cases.
    """

    name: str
    fn: Callable
    inputs: Callable[[torch.device], tuple]
    floor: Callable | None = None
    goal: float | None = None
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peers: Mapping[str, Callable[..., Callable[[], Any]]] = dataclasses.field(default_factory=dict)
    backward: tuple[int, ...] = ()
    deterministic: bool = False
    flops: int | None = None
    ways: tuple[str, ...] = ()

    def all_goals(self) -> dict[str, float]:
        return ({} if self.goal is None else {"floor": self.goal}) | dict(self.goals)
