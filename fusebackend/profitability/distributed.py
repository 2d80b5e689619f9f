"""Several ranks of one job decide alike: whichever asks first finds out, and the others take its answer.

Answers go through the process group's store, not a collective: ranks need not compile the same graphs at the same time (one may find its
code in a cache, another hold another stage of the model). A rank that is the only one to ask waits for nobody, and one that waits in vain
goes on by itself.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from fusebackend.log import log
from fusebackend.native import kept_files
from fusebackend.profitability.budget import Budget, clock_standing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

# Between two looks for an answer, in seconds: at first, and at most. A thousand ranks ask one store.
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.05

# How often this process asked about each key: the next compile may have time for what this one had none for.
_asked: collections.Counter[str] = collections.Counter()


def has_several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first_calls() -> AbstractContextManager[None]:
    """For a library's first calls, which load its code or choose kernels. Their time is not charged to timing, since the program's first
    step would spend it otherwise. With several ranks it is: the others wait for these calls, and then for their own in their first step."""
    return nullcontext() if has_several_ranks() else clock_standing()


def _finish_work(device: torch.device) -> None:
    """Waits until the current stream is idle, as timing would. A pipeline stage's stream may wait for data of another stage. If such a rank
    were the first to ask, the other stage would wait for its answer before it sends the data, and neither would go on."""
    if device.type == "cuda" and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


class Ranks:
    """The ranks of this process's default group, during one compile.

    Args:
        budget: of this compile. The seconds that a rank spends on an answer are charged to all that wait for it.
        patience: seconds for which a rank waits for another's answer.
        silent: exchange nothing: this compile only inspects (:func:`fusebackend.explain`), and the other ranks may not make it.
    """

    def __init__(self, budget: Budget, patience: float, *, silent: bool = False):
        self._budget = budget
        self._patience = patience
        self._asked = _asked
        self._store: Any = None
        self._rank = 0
        if has_several_ranks() and not silent:
            self._store = dist.PrefixStore("fusebackend/gate", dist.distributed_c10d._get_default_store())
            self._rank = dist.get_rank()

    def agreed(self, key: str, device: torch.device, find: Callable[[], T], kind: type[T]) -> tuple[T | None, int | None]:
        """What the first rank to ask about a key finds, and its number where it is another: None if ``find`` raised an exception there.

        Args:
            key: the same on all ranks.
            device: that things may be timed on.
            find: called where nobody has asked before.
            kind: the dataclass that ``find`` returns, of what :mod:`fusebackend.native.kept_files` decodes.
        """
        if self._store is None:
            return find(), None
        _finish_work(device)
        self._asked[key] += 1
        name = f"{key} {self._asked[key]}"
        if not self._is_first(name):
            message = self._received(name, kind)
            if message is not None:
                self._budget.charge(*message["seconds"])
                return message["found"], message["rank"]
        found, spent, spent_apart = None, self._budget.spent, self._budget.spent_apart
        try:
            found = find()
            return found, None
        finally:
            seconds = self._budget.spent - spent, self._budget.spent_apart - spent_apart
            self._send(name, {"found": found and dataclasses.asdict(found), "rank": self._rank, "seconds": seconds})

    def _is_first(self, name: str) -> bool:
        try:
            return self._store.add(f"{name} asked", 1) == 1
        except Exception as error:
            self._go_on_alone(f"the store can't be asked: {error}")
            return True

    def _send(self, name: str, message: dict[str, Any]) -> None:
        if self._store is None:
            return
        try:
            self._store.set(name, json.dumps(message))
        except Exception as error:  # a store that is gone must not cost a compile
            log.debug("the decision did not reach the other ranks: %s", error)

    def _received(self, name: str, kind: type[T]) -> dict[str, Any] | None:
        """Looks again and again, since waiting would keep other threads of this process, NCCL's among them, from the store."""
        began, pause = time.perf_counter(), _FIRST_PAUSE
        try:
            while not self._store.check([name]):
                waited = time.perf_counter() - began
                if waited > self._patience:
                    self._budget.charge(waited, 0.0)
                    raise TimeoutError(f"nobody answered within {self._patience:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            message = json.loads(self._store.get(name))
            spent, spent_apart = message["seconds"]
            return {**message, "found": kept_files.decoded(kind | None, message["found"]), "seconds": (spent, spent_apart)}
        except Exception as error:
            self._go_on_alone(str(error))
            return None

    def _go_on_alone(self, why: str) -> None:
        log.warning("rank %d decides by itself from here on: %s", self._rank, why)
        self._store = None
