"""Keeps Inductor's caches right when verdicts change.

A compile's decisions are part of its code, and Inductor's key is made before they are. So they are kept beside the
report of the compile, and the next compile of the same compares them with what would be decided now: where all are the
same, its key is the same and it hits; where one has changed, the key is another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from fusebackend.log import log
from fusebackend.native import cache
from fusebackend.profitability import verdict_store as verdicts


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided on one region: whether the substitution was applied, whether it is without a verdict, and whether
    there was one."""

    applied: bool
    static: bool
    timed: bool


class Record:
    """The decisions of one compile.

    Args:
        path: where they are kept; None keeps nothing.
        remeasures: whether a verdict that is gone would be made anew (``"measure"``, ``"race"``).

    ``token`` is what belongs into the key of Inductor's caches.
    """

    def __init__(self, path: Path | None = None, remeasures: bool = False):
        self.token = ""
        self._path = path
        self._decisions: dict[str, Decision] = {}
        if path is None:
            return
        kept = _read(path)
        if kept is not None:
            self.token, self._decisions = kept
        now = {key: _now(key, d, remeasures) for key, d in self._decisions.items()}
        if any(now[key] is not d.applied for key, d in self._decisions.items()):
            self.token = hashlib.sha256(f"{self.token}{sorted(now.items())}".encode()).hexdigest()[:16]
            self._decisions = {}

    def add(self, key: str, applied: bool, static: bool, timed: bool) -> None:
        self._decisions[key] = Decision(applied, static, timed)

    def save(self) -> None:
        """Writes the decisions so far. A cache that can't be written costs only that."""
        if self._path is None or not self._decisions:
            return
        data = {"token": self.token, "decisions": {k: dataclasses.asdict(d) for k, d in self._decisions.items()}}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            cache.write_atomically(self._path, json.dumps(data).encode())
        except OSError as error:
            log.debug("decisions not kept: %s", error)


def _now(key: str, before: Decision, remeasures: bool) -> bool | None:
    """What would be decided now; None if that needs a measurement."""
    try:
        verdict = verdicts.load(key)
    except cache.CacheError:
        verdict = None
    if verdict is not None:
        return verdict.kept
    return None if remeasures and before.timed else before.static


def _read(path: Path) -> tuple[str, dict[str, Any]] | None:
    try:
        data = json.loads(path.read_bytes())
        return str(data["token"]), {k: Decision(**d) for k, d in data["decisions"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.debug("kept decisions not readable: %s", error)
        return None
