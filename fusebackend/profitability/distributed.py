"""Several ranks of one job decide alike: rank 0 decides, the others take its word.

Through the process group's store, not a collective: ranks need not compile the same graphs at the same time (one may
find its code in a cache, another hold another stage of the model), and a rank that waits in vain goes on by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator

import torch.distributed as dist

from fusebackend.log import log
from fusebackend.profitability.verdict_store import Verdict


def are_several() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclasses.dataclass
class Word:
    """A decision: the verdict, None for the static decision, and where it comes from."""

    verdict: Verdict | None
    why: str


class Agreement:
    """``given`` is rank 0's word, on the other ranks, if it came in time."""

    def __init__(self, given: Word | None = None):
        self.given = given
        self.said: Word | None = None

    def give(self, verdict: Verdict | None, why: str) -> None:
        self.said = Word(verdict, why)


class Ranks:
    """The ranks of this process's default group, during one compile; others than rank 0 wait for at most ``patience`` seconds."""

    def __init__(self, patience: float):
        self._patience = datetime.timedelta(seconds=patience)
        self._store = None
        if are_several():
            self._store = dist.PrefixStore("fusebackend/gate", dist.distributed_c10d._get_default_store())
            self._rank = dist.get_rank()

    @contextlib.contextmanager
    def agreed(self, key: str) -> Iterator[Agreement]:
        """On rank 0 what the block gives goes to the others, whatever happens in it; they have it in ``given``."""
        if self._store is None:
            yield Agreement()
            return
        if self._rank != 0:
            yield Agreement(self._ask(key))
            return
        agreement = Agreement()
        try:
            yield agreement
        finally:
            said = agreement.said or Word(None, "")
            self._tell(key, json.dumps({"verdict": said.verdict and dataclasses.asdict(said.verdict), "why": said.why}))

    def _tell(self, key: str, word: str) -> None:
        try:
            self._store.set(key, word)
        except Exception as error:  # a store that is gone must not cost a compile
            log.debug("the verdict did not reach the other ranks: %s", error)

    def _ask(self, key: str) -> Word | None:
        try:
            self._store.wait([key], self._patience)
            data = json.loads(self._store.get(key))
            return Word(data["verdict"] and Verdict(**data["verdict"]), data["why"])
        except Exception as error:
            log.warning("rank %d has no word from rank 0 and decides by itself from here on: %s", self._rank, error)
            self._store = None
            return None
