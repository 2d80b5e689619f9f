"""Keeps Inductor's caches right when measurements change.

What was decided during a compile is part of its code, and Inductor's key is made before. So decisions are kept beside the report of the
compile, and the next compile of the same compares them with what would be decided now. Where all are the same, its key is the same and
Inductor's cache hits; where one has changed, the key is another one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from fusebackend import cache_keys
from fusebackend.log import log
from fusebackend.native import cache
from fusebackend.profitability import measurement_store


@dataclasses.dataclass(frozen=True)
class RegionDecision:
    """What was decided about one region.

    Attributes:
        applied: whether the substitution was made.
        unmeasured: whether it is made where there is no measurement.
        measured: whether there was one.
    """

    applied: bool
    unmeasured: bool
    measured: bool


class DecisionRecord:
    """The decisions of one compile.

    Args:
        path: where they are kept; None keeps nothing.
        remeasures: whether a measurement that is gone would be taken anew (``"measure"``, ``"race"``).

    Attributes:
        token: belongs into the key of Inductor's caches.
    """

    def __init__(self, path: Path | None = None, remeasures: bool = False):
        self.token = ""
        self._path = path
        self._decisions: dict[str, RegionDecision] = {}
        self._unmeasured_sites: set[str] = set()
        if path is None:
            return
        self._read(path)
        now = {key: _decided_now(key, d, remeasures) for key, d in self._decisions.items()}
        measured_since = self._unmeasured_sites & measurement_store.sites() if self._unmeasured_sites else set()
        if measured_since or any(now[key] is not d.applied for key, d in self._decisions.items()):
            self.token = cache_keys.decisions(self.token, now, measured_since)
            self._decisions, self._unmeasured_sites = {}, set()

    def add(self, region: str, applied: bool, unmeasured: bool, measured: bool) -> None:
        """Remembers a decision about the region, or the whole graph, with that key."""
        self._decisions[region] = RegionDecision(applied, unmeasured, measured)

    def add_refused_unbuilt(self, site: str) -> None:
        """Remembers that the site was refused because no measurement of it is kept."""
        self._unmeasured_sites.add(site)

    def save(self) -> None:
        """Writes the decisions so far. Where the cache can't be written, nothing is kept."""
        if self._path is None or not (self._decisions or self._unmeasured_sites):
            return
        data = {
            "token": self.token,
            "decisions": {k: dataclasses.asdict(d) for k, d in self._decisions.items()},
            "unmeasured_sites": sorted(self._unmeasured_sites),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            cache.write_atomically(self._path, json.dumps(data).encode())
        except OSError as error:
            log.debug("decisions not kept: %s", error)

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_bytes())
            token, sites = str(data["token"]), {str(s) for s in data["unmeasured_sites"]}
            self._decisions = {k: RegionDecision(**d) for k, d in data["decisions"].items()}
            self.token, self._unmeasured_sites = token, sites
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.debug("kept decisions not readable: %s", error)


def _decided_now(region: str, before: RegionDecision, remeasures: bool) -> bool | None:
    """What would be decided now; None if that needs a measurement."""
    try:
        measurement = measurement_store.load(region)
    except cache.CacheError:
        measurement = None
    if measurement is not None:
        return measurement.kept
    return None if remeasures and before.measured else before.unmeasured
