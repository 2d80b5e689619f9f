"""Measurements kept on disk: one small file each, so that processes that write at once can't spoil each other's.

A measurement is about one region of a graph on one kind of device with one set of versions, all of which is in its key
(:func:`fusebackend.cache_keys.region`). A file that can't be read counts as none.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fusebackend import cache_keys
from fusebackend.log import log
from fusebackend.native import cache, kept_files
from fusebackend.rewriting.outcome import both_times


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The outcome of one timing.

    Attributes:
        kept: whether the substitution pays.
        replaced_ms, inductor_ms: times with the replacement and without, in milliseconds (:func:`.timer.times_ms`).
        how: ``"region"``, both compiled by Inductor with their neighbours; ``"calls"``, library calls one against the other;
            ``"replacement"``, the replacement, and of the original its library calls alone (0 ms without any); ``"estimate"``, the
            replacement, with what is estimated around it, where Inductor's form takes what is estimated; ``"race"``, two whole graphs.
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
        how = {"estimate": " as estimated", "replacement": " in library calls alone"}.get(self.how, "")
        if self.how == "estimate" and not self.kept and self.replaced_ms < self.inductor_ms:
            how += ", too close to tell"
        return f"{'kept' if self.kept else 'gated out'}: {both_times(self.replaced_ms, self.inductor_ms)}{how}"


def load(key: str) -> Measurement | None:
    """The measurement of that key, or None.

    Raises:
        cache.CacheError: the cache directory can't be used.
    """
    return _read(folder() / f"{key}.json")


def save(key: str, measurement: Measurement) -> None:
    """Keeps a measurement for later processes. Where the cache can't be written, nothing is kept."""
    try:
        kept_files.write(folder() / f"{key}.json", dataclasses.asdict(measurement))
    except cache.CacheError as error:
        log.debug("verdict not kept: %s", error)


def sites() -> frozenset[str]:
    """The sites of which a measurement is kept (:func:`fusebackend.cache_keys.site`); none where the cache directory can't be used."""
    try:
        return frozenset(cache_keys.site_of(name) for name in os.listdir(folder()) if name.endswith(".json"))
    except (OSError, cache.CacheError) as error:
        log.debug("no kept verdicts: %s", error)
        return frozenset()


def sites_that_may_pay(sites: Collection[str]) -> set[str]:
    """Those of ``sites`` of which a measurement is kept that does not say that they don't pay. That of a replacement by itself tells only
    together with an estimate."""
    if not sites:
        return set()
    try:
        keys = [name.removesuffix(".json") for name in os.listdir(folder()) if cache_keys.site_of(name) in sites]
        found = [(cache_keys.site_of(key), load(key)) for key in keys]
    except (OSError, cache.CacheError) as error:
        log.debug("no kept verdicts: %s", error)
        return set()
    return {site for site, m in found if m is not None and (m.kept or m.how == "replacement")}


def stored() -> Iterator[tuple[str, Measurement]]:
    """All kept measurements with their keys, oldest first."""
    for path in sorted(folder().glob("*.json"), key=_modified):
        measurement = _read(path)
        if measurement is not None:
            yield path.stem, measurement


def clear() -> int:
    """Forgets all measurements, unreadable ones too. Returns their number."""
    return len([path for path in folder().glob("*.json") if kept_files.remove(path)])


def folder() -> Path:
    """Where measurements are kept."""
    return cache.directory("gate")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process cleared it
        return 0.0


def _read(path: Path) -> Measurement | None:
    return kept_files.read(path, _measurement)


def _measurement(data: Any) -> Measurement:
    found: Measurement = kept_files.decoded(Measurement, data)
    if found.replaced_ms <= 0 or found.inductor_ms < 0 or (found.inductor_ms == 0 and found.how != "replacement"):
        raise ValueError("a time is not positive")
    return found
