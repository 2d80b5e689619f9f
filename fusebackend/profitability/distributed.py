"""Several ranks of one job decide alike: rank 0 decides, and the others take its answer.

Answers go through the process group's store, not a collective: ranks need not compile the same graphs at the same time (one may find its
code in a cache, another hold another stage of the model), and a rank that waits in vain goes on by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fusebackend.log import log
from fusebackend.profitability.measurement_store import Measurement


def has_several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is known of a region.

    Attributes:
        measurement: None leaves the decision to the estimate.
        why: where the measurement comes from (``"measured"``, ``"cached"``), or why there is none.
        key: of the kept measurement that it was, or would have been, made of, where that is not the region's own.
        kept: what is kept under that key.
    """

    measurement: Measurement | None
    why: str
    key: str = ""
    kept: Measurement | None = None


class Exchange:
    """One answer on its way from rank 0 to the others.

    Attributes:
        received: rank 0's answer, on the other ranks, if it came in time.
        sent: what this process answers.
    """

    def __init__(self, received: Answer | None = None):
        self.received = received
        self.sent: Answer | None = None

    def send(self, answer: Answer) -> None:
        self.sent = answer


class Ranks:
    """The ranks of this process's default group, during one compile.

    Args:
        patience: seconds for which ranks other than 0 wait for an answer.
    """

    def __init__(self, patience: float):
        self._patience = datetime.timedelta(seconds=patience)
        self._store: Any = None
        if has_several_ranks():
            self._store = dist.PrefixStore("fusebackend/gate", dist.distributed_c10d._get_default_store())
            self._rank = dist.get_rank()

    @contextlib.contextmanager
    def agreed(self, key: str) -> Iterator[Exchange]:
        """On rank 0 what the block sends goes to the others, also if the block raises; they find it in ``received``."""
        if self._store is None:
            yield Exchange()
            return
        if self._rank != 0:
            yield Exchange(self._receive(key))
            return
        exchange = Exchange()
        try:
            yield exchange
        finally:
            answer = exchange.sent or Answer(None, "")
            measurement = answer.measurement and dataclasses.asdict(answer.measurement)
            self._send(key, json.dumps({"measurement": measurement, "why": answer.why}))

    def _send(self, key: str, answer: str) -> None:
        try:
            self._store.set(key, answer)
        except Exception as error:  # a store that is gone must not cost a compile
            log.debug("the decision did not reach the other ranks: %s", error)

    def _receive(self, key: str) -> Answer | None:
        try:
            self._store.wait([key], self._patience)
            data = json.loads(self._store.get(key))
            return Answer(data["measurement"] and Measurement(**data["measurement"]), data["why"])
        except Exception as error:
            log.warning("rank %d timed out waiting for rank 0's decision and decides by itself from here on: %s", self._rank, error)
            self._store = None
            return None
