"""What is known of how long both forms take: by another rank of a job, from an earlier compile, or because it is measured now."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config

from fusebackend import cache_keys
from fusebackend.garbage import collection_resumed
from fusebackend.log import log, warn_once
from fusebackend.native import cache, loader
from fusebackend.profitability import measurement_store
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.distributed import Ranks
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Pattern

# Settings that are another graph's at another time: the order in which its convolutions run.
_OF_A_GRAPH = ("layout_optimization", "force_layout_optimization")


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


class Measurements:
    """The measurements of one compile.

    Args:
        budget: what timing takes is counted there; whether there is time left is asked by the callers.
        ranks: of a job that decides alike.
        compiled: whether what was only called, though Inductor would compile it, counts as not measured.
        strict: raise what goes wrong instead of leaving the decision to the estimate.
    """

    def __init__(self, budget: Budget, ranks: Ranks, *, compiled: bool, strict: bool):
        self.budget = budget
        self._ranks = ranks
        self._compiled = compiled
        self._strict = strict
        self._contexts: dict[tuple, str] = {}
        self._identities: dict[Pattern, str | None] = {}

    def agreed(self, key: str, device: torch.device, find: Callable[[], Answer], *, kept: bool) -> Answer:
        """What the first of several ranks to ask finds.

        Args:
            kept: whether measurements are written: what another rank measured is for this machine's next process too.
        """
        answer, rank = self._ranks.agreed(key, device, find, Answer)
        if rank is None or answer is None:
            return answer or Answer(None, "")
        its_key, measurement = (answer.key, answer.kept) if answer.key else (key, answer.measurement)
        if kept and measurement is not None:
            measurement_store.save(its_key, measurement)
        return dataclasses.replace(answer, why=f"{answer.why}, by rank {rank}" if answer.why else "")

    def ask_once(
        self,
        key: str,
        device: torch.device,
        timed: Callable[[], Measurement],
        why_not_timed: Callable[[], str | None],
        *,
        calls: bool = False,
        kept: bool,
    ) -> Answer:
        """What :meth:`ask` finds, on the first of several ranks to ask. ``why_not_timed`` is called there."""
        return self.agreed(key, device, lambda: self.ask(key, timed, why_not_timed(), calls=calls, kept=kept), kept=kept)

    def ask(
        self, key: str, timed: Callable[[], Measurement], why_not_timed: str | None, *, calls: bool = False, kept: bool = True
    ) -> Answer:
        """What is known under that key, from an earlier compile, or by timing it now.

        Args:
            timed: takes the measurement.
            why_not_timed: why it may not be taken now; None where it may.
            calls: whether calling both forms as they are is a measurement also where regions are compiled.
            kept: whether measurements are read and written; not where a pattern may be another one under the same name tomorrow.
        """
        answer = Answer(self._look_up(key) if kept else None, "cached")
        if answer.measurement is None or (answer.measurement.how == "calls" and self._compiled and not calls):
            return self._measured(key, timed, kept) if why_not_timed is None else Answer(None, why_not_timed)
        return answer

    def measured_with(self, device: torch.device, *patterns: Pattern) -> str:
        """What measurements depend on besides the graph (:func:`fusebackend.cache_keys.measuring`)."""
        order = {name: getattr(inductor_config, name) for name in _OF_A_GRAPH}
        name = (device, *order.values(), *(p.name for p in patterns))
        if name not in self._contexts:
            self._contexts[name] = cache_keys.measuring(
                cache_keys.machine(device),
                loader.load().key,
                {**self._inductor_settings, **order},
                [self._identity(p) or f"unidentified {p.name}" for p in patterns],
            )
        return self._contexts[name]

    @functools.cached_property
    def _inductor_settings(self) -> dict[str, Any]:
        return inductor_config.save_config_portable()  # of some thousand entries: asked once a compile

    def are_identified(self, patterns: Sequence[Pattern]) -> bool:
        """Whether measurements made with these patterns may be kept."""
        return all(self._identity(p) is not None for p in patterns)

    def _identity(self, pattern: Pattern) -> str | None:
        if pattern not in self._identities:
            try:
                self._identities[pattern] = pattern.fingerprint()
            except cache_keys.UnidentifiableError:
                self._identities[pattern] = None
        return self._identities[pattern]

    def why_failed(self, doing: str, error: Exception) -> str:
        """The reason that is reported where something can't be timed."""
        if isinstance(error, (Unfit, cache_keys.UnidentifiableError)):
            return f"not timed: {error}"
        if self._strict:
            raise error
        lines = str(error).strip().splitlines()
        reason = f"not timed: {doing} raised {type(error).__name__}: {lines[0] if lines else ''}"
        warn_once(f"{reason} (the estimate decides; fuse.strict=True raises)")
        return reason

    def _look_up(self, key: str) -> Measurement | None:
        try:
            return measurement_store.load(key)
        except cache.CacheError as error:
            log.debug("no kept verdicts: %s", error)
            return None

    def _measured(self, key: str, timed: Callable[[], Measurement], kept: bool) -> Answer:
        try:
            with self.budget.spending(), collection_resumed():
                measurement = timed()
        except Exception as error:
            return Answer(None, self.why_failed("timing", error))
        if kept:
            measurement_store.save(key, measurement)
        return Answer(measurement, "measured")
