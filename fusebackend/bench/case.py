"""One benchmark case of a family: a function, its inputs, its peers and its goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # the command line imports this package, and must not pay for torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        name: the operation and the shape, e.g. ``"bf16 24300x11520"``; unique in its family.
        fn: ordinary PyTorch, which the backend is expected to rewrite. It may modify its arguments in place.
        inputs: makes the arguments on a device. The same ``torch.manual_seed`` gives the same arguments.
        floor: a call on the same arguments that moves the same bytes in the simplest way: a lower bound on the time.
        goal: short for ``goals={"floor": goal}``.
        goals: column -> the largest accepted ratio of fuse's time to that column's; ``"ms"`` -> its largest accepted time in ms.
            Columns are ``"floor"``, the keys of :data:`fusebackend.bench.kernels.WAYS` and the keys of ``peers``.
        peers: further columns: name -> a function that prepares a peer from the arguments and returns the call, without
            arguments, that is timed. What it raises is printed in place of the column.
        backward: positions of the inputs whose gradients are computed. If there are any, the backward of ``fn`` is timed
            alone, in place of ``fn``.
        deterministic: compile and time under ``torch.use_deterministic_algorithms``.
        flops: floating-point operations of one call, from which a rate is printed.
        static: never compile it with ``dynamic=True``, where the sizes and numbers that the family must know would be symbols.
        ways: the ways to time, if not all are informative; all if empty. Compiling dominates the time of a long list of cases.
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
    static: bool = False
    ways: tuple[str, ...] = ()

    def all_goals(self) -> dict[str, float]:
        """``goals`` with ``goal`` among them."""
        return ({} if self.goal is None else {"floor": self.goal}) | dict(self.goals)


def random_gradient(out: torch.Tensor) -> torch.Tensor:
    """A gradient of a result: random numbers, in the result's memory order, as most gradients in models come. Autograd copies others, which
    would be timed, too. The same ``torch.manual_seed`` gives the same numbers in every dtype and order."""
    import torch

    return torch.empty_like(out).copy_(torch.randn(out.shape, device=out.device))
