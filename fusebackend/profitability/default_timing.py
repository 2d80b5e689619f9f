"""What ``fuse.gate="auto"`` times, for which nobody asked, in a tenth of the time that the compile took so far; and besides that tenth what
is expected to pay for itself soon: a region that is compiled both ways, and calls on a CPU, which may be long.

Library calls are called both ways, unless the estimate is clear. Where Inductor would generate code too, the replacement is called by
itself, and so are the library calls among what it replaces: it pays if it takes less than these alone, or less than these and the estimate
of what Inductor generates beside them, or less than the estimate of the original. Where the estimate of the original leaves it open,
or the replacement was not calibrated, so that nothing is known of what it costs around it, the region is compiled both ways, if there is so
much to gain that it is worth the time.

A replacement that was not calibrated, beside another of the same site that was, is called by itself: it is taken if it takes less than the
other is estimated to take.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend.profitability import calibration
from fusebackend.profitability.budget import Doing, clock
from fusebackend.profitability.estimating import (
    COMPILE_SECONDS,
    RUNS,
    calling_seconds,
    inductor_decides,
    is_clear,
    measured,
    ours_decides,
    pays,
    pays_soon,
    with_library_calls,
)
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.measurements import Answer, Measurements
from fusebackend.profitability.region import Region, are_nearly_calls, library_calls
from fusebackend.profitability.region_timing import MARGIN, time_region, time_replacement
from fusebackend.rewriting.pattern import Estimate, Interval


@dataclasses.dataclass(frozen=True)
class _Room:
    """What a compile has left for a timing.

    Attributes:
        why_not: None where it is enough.
        apart: whether the timing is counted apart from the compile's tenth, since it pays for itself soon.
    """

    why_not: str | None
    apart: bool


class DefaultTiming:
    """The timing of one compile in mode ``"auto"``.

    Args:
        patches: the Inductor configuration without our passes, under which regions are compiled.
        allowed: whether anything may be timed; otherwise only kept measurements are looked up.
    """

    def __init__(self, measurements: Measurements, patches: dict[str, Any], *, allowed: bool):
        self._measurements = measurements
        self._patches = patches
        self._allowed = allowed
        self._compile_seconds = COMPILE_SECONDS
        self._called: dict[str, Answer] = {}  # measurements without neighbours, of this compile

    def is_open(self, device: torch.device, estimate: Estimate) -> bool:
        """Whether something of a match may be timed if there is time for it."""
        if not self._allowed or estimate.pays is False or device.type not in ("cuda", "cpu"):
            return False
        if device.type == "cpu" and _lacks_a_form(estimate):  # a call may take seconds
            return False
        return not estimate.untimed and not is_clear(estimate)

    def why_not(self, core: Sequence[fx.Node], device: torch.device, estimate: Estimate) -> str | None:
        """None where something of a match may be timed; otherwise why not, empty where that goes without saying."""
        if not self.is_open(device, estimate):
            return ""
        if are_nearly_calls(core) or (estimate.pays is None and (estimate.rival is not None or _may_be_told_alone(core, estimate))):
            return self._room_to_call(device, estimate).why_not
        if estimate.pays is None and (_lacks_a_form(estimate) or self._is_worth_compiling(estimate.ours, estimate.inductor)):
            return self._room_to_compile(estimate.ours, estimate.inductor).why_not
        return ""

    def ask(self, key: str, names: tuple[str, str], region: Region, estimate: Estimate, subject: str, kept: bool) -> Answer:
        """What is known of both forms of a region, or becomes known now.

        Args:
            key: of the measurement of both forms.
            names: what :meth:`Region.key` makes it of. What is called is kept under the key of the region without its neighbours: a model's
                layers are alike but at its ends, where the neighbours are others, and it is timed once for all of them.
            subject: what is timed, for people.
            kept: as for :meth:`Measurements.ask`.
        """
        why_not = self.why_not(region.core, region.device, estimate)
        unmentioned = None if why_not is None else ""  # the refusal says it
        answer = self._of_region(key, region, subject, "", kept)
        if answer.measurement is not None:
            return answer
        if region.is_nearly_calls and not estimate.untimed:
            timed = functools.partial(self._time_calls, region, subject, estimate)
            return self._ask_called("calls", names, region, estimate, timed, unmentioned, kept)
        if why_not == "":
            return answer
        ours, inductor, judged = estimate.ours, estimate.inductor, Answer(None, unmentioned or "")
        if _may_be_told_alone(region.core, estimate) or _lacks_a_form(estimate):
            alone = self._ask_called("alone", names, region, estimate, lambda: time_replacement(region, subject), unmentioned, kept)
            if alone.measurement is None:
                return alone
            ours = measured(calibration.of_device(region.device), alone.measurement.replaced_ms, math.log(MARGIN)) + estimate.around
            if inductor is None and estimate.generated is not None:
                inductor = with_library_calls(estimate.generated, alone.measurement.inductor_ms, math.log(MARGIN))
            judged = _judged(alone, alone.measurement, ours, inductor, around=estimate.ours is not None)
            if judged.measurement is not None and judged.measurement.kept:
                return judged
        if why_not is not None or not self._is_worth_compiling(ours, inductor):
            return judged
        room = self._room_to_compile(ours, inductor)
        compiled = self._of_region(key, region, subject, room.why_not, kept, apart=room.apart)
        if compiled.measurement is not None:
            return compiled
        return dataclasses.replace(judged, why="; ".join(filter(None, (judged.why, compiled.why))))

    def ask_rivals(self, key: str, names: tuple[str, str], region: Region, estimate: Estimate, subject: str, kept: bool) -> Answer:
        """Whether a replacement by itself takes less than its rival is estimated to take. The arguments are those of :meth:`ask`."""
        rival = estimate.rival
        assert rival is not None and rival.ours is not None and rival.inductor is not None
        whole = self._of_region(key, region, subject, "", kept)
        if whole.measurement is not None:
            return whole
        why_not = self.why_not(region.core, region.device, estimate)
        answer = self._ask_called("alone", names, region, estimate, lambda: time_replacement(region, subject), why_not, kept)
        if answer.measurement is None:
            return answer
        ours = measured(calibration.of_device(region.device), answer.measurement.replaced_ms, math.log(MARGIN)) + estimate.around
        faster = ours.expected < rival.ours.expected and (rival.pays is True or pays(ours, rival.inductor) is True)
        judged = _as_estimated(answer.measurement, ours, rival.inductor, kept=faster)
        return dataclasses.replace(answer, measurement=judged, why=f"{answer.why}; replaced otherwise it takes {rival.ours} as estimated")

    def _of_region(self, key: str, region: Region, subject: str, why_not_timed: str | None, kept: bool, *, apart: bool = False) -> Answer:
        """What is known of both forms compiled, or becomes known now; ``apart`` says whether that is counted apart."""
        timed = functools.partial(self._time_compiled, region, subject)
        return self._measurements.ask(key, self._counted(timed, apart), why_not_timed, kept=kept)

    def _ask_called(
        self,
        what: str,
        names: tuple[str, str],
        region: Region,
        estimate: Estimate,
        timed: Callable[[], Measurement],
        why_not_timed: str | None,
        kept: bool,
    ) -> Answer:
        """The same of what is called. The other modes want to know more, so the key is not theirs."""
        key = f"{region.without_neighbours().key(*names)}-{what}"
        known = self._called.get(key)
        if known is not None:
            return known
        timed = self._counted(timed, self._room_to_call(region.device, estimate).apart)
        answer = self._measurements.ask(key, timed, why_not_timed, kept=kept)
        answer = dataclasses.replace(answer, key=key, kept=answer.measurement)
        if answer.measurement is not None:
            self._called[key] = dataclasses.replace(answer, why="as above")
        return answer

    def _counted(self, timed: Callable[[], Measurement], apart: bool) -> Callable[[], Measurement]:
        """``timed``, with its time counted apart from the compile's tenth if ``apart`` says so."""

        def timed_apart() -> Measurement:
            with self._measurements.budget.spending_apart():
                return timed()

        return timed_apart if apart else timed

    def _is_worth_compiling(self, ours: Interval | None, inductor: Interval | None) -> bool:
        """Whether compiling both forms may tell that the replacement pays, and so much may be gained."""
        if ours is None or (inductor is not None and not inductor_decides(ours, inductor)):
            return False
        # Where nothing is known of Inductor's form, the gain may be as much as the replacement takes.
        gain_us = ours.expected if inductor is None else inductor.high - ours.expected
        return gain_us * RUNS >= self._compile_seconds * 1e6

    def _room_to_call(self, device: torch.device, estimate: Estimate) -> _Room:
        """For calls of both forms. On a GPU a call is short."""
        if device.type != "cpu":
            return _Room(self._measurements.budget.why_default_spent(), apart=False)
        return self._room("calling", calling_seconds(estimate.ours, estimate.inductor), estimate.ours, estimate.inductor)

    def _room_to_compile(self, ours: Interval | None, inductor: Interval | None) -> _Room:
        """For compiling both forms and calling them."""
        return self._room("compiling", self._compile_seconds + calling_seconds(ours, inductor), ours, inductor)

    def _room(self, doing: Doing, seconds: float, ours: Interval | None, inductor: Interval | None) -> _Room:
        budget, apart = self._measurements.budget, pays_soon(ours, inductor, seconds)
        return _Room(budget.why_spent_apart(doing, seconds) if apart else budget.why_default_spent(doing, seconds), apart)

    def _time_calls(self, region: Region, subject: str, estimate: Estimate) -> Measurement:
        return time_region(region, subject, calls=True, brief=True, patches=self._patches, is_lighter=estimate.is_lighter)

    def _time_compiled(self, region: Region, subject: str) -> Measurement:
        began = clock()
        measurement = time_region(region, subject, calls=False, brief=False, patches=self._patches)
        self._compile_seconds = max(self._compile_seconds, clock() - began)
        return measurement


def _may_be_told_alone(core: Sequence[fx.Node], estimate: Estimate) -> bool:
    """Whether the time of the replacement by itself may tell that it pays."""
    return (estimate.pays is None and ours_decides(estimate.ours, estimate.inductor)) or bool(library_calls(core))


def _lacks_a_form(estimate: Estimate) -> bool:
    """Whether nothing is known of the time of one of the forms, at least."""
    return estimate.ours is None or estimate.inductor is None


def _judged(answer: Answer, alone: Measurement, ours: Interval, inductor: Interval | None, *, around: bool) -> Answer:
    """What the time of a replacement by itself tells. What follows from the estimate is not kept: the next calibration may give another.

    Args:
        around: whether it is known what neighbours take that are not fused any more: nothing is, where the replacement is not calibrated.
    """
    if alone.kept:
        return dataclasses.replace(answer, why=f"{answer.why}; of Inductor's form the library calls alone")
    if inductor is None:
        return dataclasses.replace(answer, measurement=None, why=f"{alone}; how long the rest of Inductor's form takes is not known")
    if not around:
        return dataclasses.replace(answer, measurement=None, why=f"{alone}; what it costs around the replacement is not known")
    estimated = _as_estimated(alone, ours, inductor, kept=pays(ours, inductor) is True)
    why = f"{answer.why}; Inductor's form, and what the replacement costs around it, as estimated"
    return dataclasses.replace(answer, measurement=estimated, why=why)


def _as_estimated(alone: Measurement, ours: Interval, inductor: Interval, *, kept: bool) -> Measurement:
    """A replacement by itself, with what it costs around it, against the estimate of the original."""
    return dataclasses.replace(alone, kept=kept, replaced_ms=ours.expected / 1e3, inductor_ms=inductor.expected / 1e3, how="estimate")
