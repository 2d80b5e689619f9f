"""Keeps Inductor's caches right when measurements change.

What was decided during a compile is part of its code, and Inductor's key is made before. So decisions are kept beside the report of the
compile, and the next compile of the same compares them with what would be decided now. Where all are the same, its key is the same and
Inductor's cache hits; where one has changed, the key is another one.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from fusebackend import cache_keys
from fusebackend.native import cache, kept_files
from fusebackend.profitability import measurement_store
from fusebackend.profitability.measurement_store import Measurement


@dataclasses.dataclass(frozen=True)
class RegionDecision:
    """What was decided about one region.

    Attributes:
        applied: whether the substitution was made.
        unmeasured: whether it is made where there is no measurement.
        measured: whether there was one.
        by: the key of the kept measurement that decided, or would have if there had been one, where that is not the region's own.
        then: what that measurement said at the end of the compile; empty if there was none.
    """

    applied: bool
    unmeasured: bool
    measured: bool
    by: str
    then: str


class DecisionRecord:
    """The decisions of one compile.

    Args:
        path: where they are kept; None keeps nothing.
        remeasures: whether a measurement that is gone would be taken anew (``"measure"``, ``"race"``).

    Attributes:
        token: belongs into the key of Inductor's caches.
        measured_sites: of which a measurement was found or taken in this compile.
    """

    def __init__(self, path: Path | None = None, remeasures: bool = False):
        self.token = ""
        self._path = path
        self._decisions: dict[str, RegionDecision] = {}
        self._unmeasured_sites: set[str] = set()
        self._said: dict[str, str] = {}  # by key, what was measured in this compile
        self.measured_sites: set[str] = set()
        if path is None:
            return
        self._read(path)
        now = {key: _decided_now(key, d, remeasures) for key, d in self._decisions.items()}
        measured_since = measurement_store.sites_that_may_pay(self._unmeasured_sites)
        if measured_since or any(now[key] is not d.applied for key, d in self._decisions.items()):
            self.token = cache_keys.decisions(self.token, now, measured_since)
            self._decisions, self._unmeasured_sites = {}, set()

    def add(
        self, region: str, applied: bool, unmeasured: bool, measured: bool, by: str = "", measurement: Measurement | None = None
    ) -> None:
        """Remembers a decision about the region, or the whole graph, with that key.

        Args:
            applied, unmeasured, measured, by: as for :class:`RegionDecision`.
            measurement: that of the key ``by``.
        """
        self._decisions[region] = RegionDecision(applied, unmeasured, measured, by, "")
        if measurement is not None:
            self._said[by] = _said(measurement)

    def add_refused_unbuilt(self, site: str) -> None:
        """Remembers that the site was refused because no measurement of it is kept."""
        self._unmeasured_sites.add(site)

    def save(self) -> None:
        """Writes the decisions so far. Where the cache can't be written, nothing is kept.

        A site may have been refused while there was no time for it, and one like it timed later in the same compile: that is no reason to
        compile once more.
        """
        if self._path is None or not (self._decisions or self._unmeasured_sites):
            return
        unmeasured = self._unmeasured_sites - self.measured_sites
        decisions = {key: dataclasses.replace(d, then=self._said.get(d.by, d.then)) for key, d in self._decisions.items()}
        kept_files.write(self._path, dataclasses.asdict(_Kept(self.token, decisions, sorted(unmeasured))))

    def _read(self, path: Path) -> None:
        kept = kept_files.read(path, _kept)
        if kept is not None:
            self.token, self._decisions, self._unmeasured_sites = kept.token, kept.decisions, set(kept.unmeasured_sites)


@dataclasses.dataclass(frozen=True)
class _Kept:
    token: str
    decisions: dict[str, RegionDecision]
    unmeasured_sites: list[str]


def _kept(data: Any) -> _Kept:
    found: _Kept = kept_files.decoded(_Kept, data)
    for key in (found.token, *found.decisions, *(d.by for d in found.decisions.values()), *found.unmeasured_sites):
        if not re.fullmatch(r"[0-9a-f-]*(calls|alone)?", key):  # names files
            raise ValueError(f"no key: {key[:100]!r}")
    return found


def _decided_now(region: str, before: RegionDecision, remeasures: bool) -> bool | None:
    """What would be decided now; None if that needs a measurement."""
    measurement = _kept_measurement(region)
    if measurement is not None:
        return measurement.kept
    if before.by:  # by that, and by an estimate, which is the same as long as the calibration is: the code has another key with another
        called = _kept_measurement(before.by)
        says_so = called is not None and called.how == "calls" and called.kept is before.applied
        return before.applied if says_so or _said(called) == before.then else None
    return None if remeasures and before.measured else before.unmeasured


def _said(measurement: Measurement | None) -> str:
    return "" if measurement is None else f"{measurement.kept} {measurement.replaced_ms!r} {measurement.inductor_ms!r}"


def _kept_measurement(key: str) -> Measurement | None:
    try:
        return measurement_store.load(key)
    except cache.CacheError:
        return None
