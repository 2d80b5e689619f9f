"""What was timed, kept on disk: one small file a verdict, so that processes that write at once can't spoil each other's.

A verdict is about one region of a graph on one kind of device with one set of versions; all that is in its key. A file
that can't be read counts as no verdict.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from fusebackend.log import log
from fusebackend.native import cache


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one timing.

    Attributes:
        kept: whether the substitution pays.
        replaced_ms, inductor_ms: median times with the replacement and without, in milliseconds.
        how: ``"region"``, both compiled by Inductor with their neighbours; ``"calls"``, library calls one against the other;
            ``"race"``, two whole graphs.
        subject: what was timed, for people.
        machine: the device it was timed on.
    """

    kept: bool
    replaced_ms: float
    inductor_ms: float
    how: str
    subject: str = ""
    machine: str = ""

    def __str__(self) -> str:
        return f"{'kept' if self.kept else 'gated out'}: {times(self.replaced_ms, self.inductor_ms)}"


def times(replaced_ms: float, inductor_ms: float) -> str:
    """``1.23 ms replaced against 0.98 ms by Inductor``"""
    ours, theirs = (f"{t:.0f}" if t >= 100 else f"{t:.3g}" for t in (replaced_ms, inductor_ms))
    return f"{ours} ms replaced against {theirs} ms by Inductor"


def load(key: str) -> Verdict | None:
    """The verdict of that key, or None. Raises cache.CacheError where the cache directory can't be used."""
    return _read(_folder() / f"{key}.json")


def save(key: str, verdict: Verdict) -> None:
    """Keeps a verdict for later processes. A cache that can't be written costs only that."""
    try:
        cache.write_atomically(_folder() / f"{key}.json", json.dumps(dataclasses.asdict(verdict)).encode())
    except (OSError, cache.CacheError) as error:
        log.debug("verdict not kept: %s", error)


def stored() -> Iterator[tuple[str, Verdict]]:
    """All kept verdicts with their keys, oldest first."""
    for path in sorted(_folder().glob("*.json"), key=lambda p: p.stat().st_mtime):
        verdict = _read(path)
        if verdict is not None:
            yield path.stem, verdict


def clear() -> int:
    """Forgets all verdicts, unreadable ones too. Returns their number."""
    found = list(_folder().glob("*.json"))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _folder() -> Path:
    return cache.directory("gate")


def _read(path: Path) -> Verdict | None:
    try:
        data = json.loads(path.read_bytes())
        verdict = Verdict(**data)
        if not isinstance(verdict.kept, bool) or not all(t > 0 for t in (verdict.replaced_ms, verdict.inductor_ms)):
            raise ValueError(f"no verdict: {data}")
        return verdict
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.debug("kept verdict %s not readable: %s", path.name, error)
        return None
