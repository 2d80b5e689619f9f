"""Decides whether a substitution pays: ``options={"fuse.gate": ...}``.

The user's choice comes first (``"off"`` applies every legal match, and none of this is asked), then a measurement that is kept, then the
pattern's estimate, then a new measurement, and where there is none the site is left to Inductor.

``"auto"``     Kept measurements and estimates decide. What the estimates leave open may be timed, as long as that stays under a tenth of
               the compile so far, or pays for itself soon (:mod:`fusebackend.profitability.default_timing`).
``"measure"``  Every region, with the neighbours that Inductor could fuse, is compiled by Inductor both ways and timed. Where both forms
               are library calls, with which Inductor fuses nothing, they are called as they are.
``"race"``     In addition every graph that was rewritten is compiled both ways: before the partitioner forward and backward as one step
               (:mod:`fusebackend.profitability.joint_race`), then each by itself (:mod:`fusebackend.profitability.graph_race`).

A measurement is kept on disk under the region's operators, shapes, strides, dtypes, the kind of device and the versions of everything
that made the code, so equal regions of a model are timed once, and those of the next process not at all. Whatever goes wrong while
timing leaves the decision to the estimate, with the reason in the report.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.native import loader
from fusebackend.profitability import calibration, channels_last, measurement_store
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.concatenations import copies_of_parts
from fusebackend.profitability.decision_record import DecisionRecord
from fusebackend.profitability.default_timing import DefaultTiming
from fusebackend.profitability.distributed import Ranks
from fusebackend.profitability.estimating import Estimator
from fusebackend.profitability.fresh_inputs import symbols_of
from fusebackend.profitability.kept_answers import KeptAnswers
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.measurements import Answer, Measurements
from fusebackend.profitability.region import Region, device_of, extract
from fusebackend.profitability.region_timing import time_region
from fusebackend.rewriting import convolution_layout, describe
from fusebackend.rewriting.outcome import Source, Verdict
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject, Workload
from fusebackend.rewriting.profitability_policy import Decision, Proposal

#: What a report calls the choice of a memory order, in the place of a pattern.
CHANNELS_LAST = "channels_last"

# Where so many sites of a pattern in a row were left to Inductor although it was asked for each, it is not asked for others of the compile.
_ASKED_IN_VAIN = 4

# How many seconds a rank waits for another's answer: in modes in which the other may spend ``gate_seconds`` on it, after these.
_PATIENCE = 60.0


@dataclasses.dataclass(frozen=True)
class _Unbuilt:
    """Why a replacement is not even built: no measurement of it is kept, and this is why none will be taken. None where it is built."""

    why_not_timed: str | None


class Gate:
    """The :class:`fusebackend.rewriting.profitability_policy.ProfitabilityPolicy` of one compile.

    Args:
        mode: ``"auto"``, ``"measure"`` or ``"race"``.
        seconds: how long this compile may spend on timing; looked at before each.
        patches: the Inductor configuration without our passes, under which regions are compiled.
        record: remembers this compile's decisions for the key of Inductor's caches.
        timing: whether anything may be timed; otherwise only kept measurements and estimates decide.
        strict: raise what goes wrong instead of leaving the decision to the estimate.
    """

    def __init__(
        self,
        mode: str,
        seconds: float,
        patches: dict[str, Any],
        record: DecisionRecord | None = None,
        *,
        timing: bool = True,
        strict: bool = False,
    ):
        self.mode = mode
        self.record = record or DecisionRecord()
        self.budget = Budget(seconds)
        by_default = mode == "auto"
        self._ranks = Ranks(self.budget, _PATIENCE if by_default else seconds + _PATIENCE, silent=not timing)
        self.measurements = Measurements(self.budget, self._ranks, compiled=not by_default, strict=strict)
        self._by_default = DefaultTiming(self.measurements, patches, allowed=timing)
        self._patches = patches
        self._timing = timing
        self._answers: dict[str, Answer] = {}  # by region, of this compile
        self._measured_sites: frozenset[str] | None = None  # before this graph
        self._estimators: dict[torch.device, Estimator] = {}
        self._in_vain: collections.Counter[str] = collections.Counter()  # by pattern, the sites in a row
        self._was_asked_for = False  # the site that was estimated last

    def estimate(self, pattern: Pattern, match: Match) -> Estimate:
        """What the pattern says, or what the device's calibration makes of the work that it describes."""
        self._was_asked_for = False
        if convolution_layout.depends_on(match.nodes):
            reason = "without it Inductor would run the graph's other convolutions in another memory order"
            return Estimate(False, reason, "estimated_slower")
        answer = pattern.estimate(match)
        if isinstance(answer, Estimate):
            return answer
        device = device_of(match.outputs)
        if device not in self._estimators:
            kept = KeptAnswers(functools.partial(self.measurements.measured_with, device))
            self._estimators[device] = Estimator(calibration.of_device(device), kept)
        workloads, estimator = [answer] if isinstance(answer, Workload) else answer, self._estimators[device]
        workloads = [dataclasses.replace(w, ours=(*w.ours, *copies_of_parts((w.match or match).nodes))) for w in workloads]
        questions, why_not_asked = estimator.questions, ""
        if self._in_vain[pattern.name] >= _ASKED_IN_VAIN:
            why_not_asked = f"for {_ASKED_IN_VAIN} sites of this pattern in a row Inductor was asked in vain, and is not for the rest"
        found = estimator.estimate(workloads, pattern.level, match.outputs, match.nodes, why_not_asked, pattern.name)
        self._was_asked_for = estimator.questions > questions
        self._in_vain[pattern.name] += self._was_asked_for  # until it is replaced
        return found

    def refuse_unbuilt(self, proposal: Proposal) -> Reject | None:
        """In mode ``"auto"`` an estimate refuses a match where no measurement of it is kept and none would be taken."""
        proposal = _without_guesses(proposal)
        if self.mode != "auto" or proposal.estimate.pays:
            return None
        try:
            device = device_of(proposal.match.outputs)
            site = self._site(proposal, device)
            find = functools.partial(self._unbuilt, site, proposal, device)
            found: _Unbuilt | None
            if self._by_default.is_open(device, proposal.estimate):
                found, _ = self._ranks.agreed(f"unbuilt {site}", device, find, _Unbuilt)
            else:
                found = find()
        except Exception:
            return None  # raised again, and reported, once the replacement is built
        if found is None or found.why_not_timed is None:
            return None
        self.record.add_refused_unbuilt(site)
        return _refusal(proposal.estimate, found.why_not_timed)

    def _unbuilt(self, site: str, proposal: Proposal, device: torch.device) -> _Unbuilt:
        why_not_timed = self._by_default.why_not(proposal.match.nodes, device, proposal.estimate)
        return _Unbuilt(None if why_not_timed is None or self._is_measured(site) else why_not_timed)

    def building(self, proposal: Proposal) -> AbstractContextManager[None]:
        """Where the replacement is built only to be timed, and nobody asked for it, that counts as timing."""
        proposal = _without_guesses(proposal)
        if self.mode != "auto" or proposal.estimate.pays is not None:
            return contextlib.nullcontext()
        try:
            is_known = self._is_measured(self._site(proposal, device_of(proposal.match.outputs)))
        except Exception:
            return contextlib.nullcontext()  # raised again, and reported, once the replacement is built
        return contextlib.nullcontext() if is_known else self.budget.spending()

    def _is_measured(self, site: str) -> bool:
        """Whether a measurement of the site is kept, or was taken in this compile."""
        if self._measured_sites is None:
            self._measured_sites = measurement_store.sites()
        return site in self._measured_sites or site in self.record.measured_sites

    def decide(self, proposal: Proposal, new_outputs: Sequence[fx.Node], emitted: Sequence[fx.Node]) -> Decision:
        """Decides by a kept measurement, by a new one, or by the estimate."""
        proposal = _without_guesses(proposal)
        match, estimate, key = proposal.match, proposal.estimate, None
        try:
            region = extract(match.nodes, emitted, dict(zip(match.outputs, new_outputs)), estimate.orders)
            names = self._site(proposal, region.device), self.measurements.measured_with(region.device, proposal.pattern)
            key = region.key(*names)
            known = self._answers.get(key)
            if known is None:
                subject = f"{proposal.pattern.name} {describe.shapes(match.outputs, emitted)}"
                kept = self.measurements.are_identified([proposal.pattern])
                find = functools.partial(self._asked, key, names, region, proposal, subject, kept)
                if self.mode == "auto" and not self._by_default.is_open(region.device, estimate):
                    answer = find()  # nothing will be timed, and every rank makes the same estimate
                else:
                    answer = self.measurements.agreed(key, region.device, find, kept=kept)
                self._answers[key] = answer
                if answer.measurement is not None:
                    self._answers[key] = dataclasses.replace(answer, why="as above")
                if answer.measurement is not None or answer.kept is not None:
                    self.record.measured_sites.add(names[0])
            else:
                answer = known
        except Exception as error:
            answer = Answer(None, self.measurements.why_failed("timing", error))
        measurement = answer.measurement
        if measurement is not None:
            refusal = None if measurement.kept else Reject(str(measurement), code="measured_slower")
        else:
            refusal = None if estimate.pays else _refusal(estimate)
        if refusal is None and self._was_asked_for:
            self._in_vain[proposal.pattern.name] = 0
        if key is not None:
            self.record.add(key, refusal is None, estimate.pays is True, measurement is not None, answer.key, answer.kept)
        if (measurement is None and not answer.why) or (refusal is not None and estimate.rival is not None):
            return Decision(refusal)  # nothing was said of Inductor's form, or the rival's decision tells of the site
        source = describe.source_of(match.outputs[0])
        return Decision(refusal, verdict_of(proposal.pattern.name, proposal.graph, source, answer, refusal is None))

    def _asked(self, key: str, names: tuple[str, str], region: Region, proposal: Proposal, subject: str, kept: bool) -> Answer:
        """What is known of both forms of a region, or becomes known now."""
        if proposal.estimate.rival is not None:
            faster = self._by_default.ask_rivals(key, names, region, proposal.estimate, subject, kept)
            if self.mode == "auto" or faster.measurement is None or not faster.measurement.kept:
                return faster
        if self.mode == "auto":
            return self._by_default.ask(key, names, region, proposal.estimate, subject, kept)
        why_not = self.budget.why_spent() if self._timing else "not timed: nothing is compiled here"
        return self.measurements.ask(key, lambda: self._time(region, subject, proposal.estimate), why_not, calls=region.is_calls, kept=kept)

    def _time(self, region: Region, subject: str, estimate: Estimate) -> Measurement:
        self.budget.show(subject)
        calls, is_lighter = region.is_calls, estimate.is_lighter
        return time_region(region, subject, calls=calls, brief=False, patches=self._patches, is_lighter=is_lighter)

    def memory_order(self, convolutions: Sequence[fx.Node], replacing: Collection[Pattern] = ()) -> Verdict:
        """Whether these, all of a forward that Inductor would run as planes, run faster channels last, with their gradients.

        Args:
            replacing: the patterns that replace scatters by what takes as long in either order.
        """
        key = ""
        try:
            device = device_of(convolutions)
            known = calibration.of_device(device)
            # Where a family was not calibrated, its sites may be left for want of time.
            replaced = known is not None and any(pattern.name in known.models for pattern in replacing)
            calls = channels_last.calls_of(convolutions, scatters=not replaced)
            key = cache_keys.memory_order(self.measurements.measured_with(device), str(calls))
            timed = functools.partial(self._time_orders, calls, device)
            answer = self.measurements.ask_once(key, device, timed, self._why_no_order_is_timed, calls=True, kept=True)
        except Exception as error:
            answer = Answer(None, self.measurements.why_failed("timing", error))
        applied = answer.measurement is not None and answer.measurement.kept
        if key:
            self.record.add(key, applied, False, answer.measurement is not None)
        if answer.measurement is not None:
            answer = dataclasses.replace(answer, why=f"{answer.why}: the library's calls, and what else takes longer channels last")
        return verdict_of(CHANNELS_LAST, "forward", describe.source_of(convolutions[0]), answer, applied)

    def _time_orders(self, calls: channels_last.Calls, device: torch.device) -> Measurement:
        if self.mode != "auto":
            self.budget.show("the order of convolutions")
        return channels_last.time_both_orders(calls, device)

    def _why_no_order_is_timed(self) -> str | None:
        if not self._timing:
            return "not timed: nothing is compiled here"
        if getattr(inductor_config, "deterministic", False):
            return "not timed: torch._inductor.config.deterministic is set"
        if self.mode != "auto":
            return self.budget.why_spent()
        return self.budget.why_default_spent()

    def close(self) -> None:
        """At the end of each graph: ends the progress line, and looks for new measurements on disk at the next."""
        self.budget.close()
        self._measured_sites = None

    def _site(self, proposal: Proposal, device: torch.device) -> str:
        match = proposal.match
        nodes, inputs = sorted(set(match.nodes)), g.inputs_of(match.nodes)
        text = cache_keys.graph_text(inputs, nodes, match.outputs, symbols_of(inputs))
        return cache_keys.site(self.measurements.measured_with(device, proposal.pattern), text, match.note)


def verdict_of(pattern: str, graph: str, source: Source, answer: Answer, applied: bool) -> Verdict:
    """An answer as it is reported."""
    if answer.measurement is None:
        return Verdict(pattern, graph, source, applied, None, None, answer.why)
    return Verdict(pattern, graph, source, applied, answer.measurement.replaced_ms, answer.measurement.inductor_ms, answer.why)


def _without_guesses(proposal: Proposal) -> Proposal:
    """Another CPU's calibration says nothing of portable code, which takes the place of our families' kernels where they don't run."""
    ours = type(proposal.pattern).__module__.startswith("fusebackend.patterns.")
    if not proposal.estimate.pays or not ours or loader.load().tuned_for_cpu:
        return proposal
    known = calibration.of_device(torch.device("cpu"))
    if known is not None and not known.is_prior and not known.ships:
        return proposal  # its user made it here, with these kernels
    if any(g.is_tensor(n) and g.value(n).device.type == "cpu" for n in proposal.match.outputs):
        reason = "the kernels for this CPU are portable code, which nobody has measured here: python -m fusebackend calibrate"
        return dataclasses.replace(proposal, estimate=dataclasses.replace(proposal.estimate, pays=None, reason=reason, code="unmeasured"))
    return proposal


def _refusal(estimate: Estimate, why_not_timed: str = "") -> Reject:
    """Why a match that is not known to pay is not applied."""
    if estimate.pays is None:
        why = f", since {why_not_timed}" if why_not_timed else ""
        return Reject(f'{estimate.reason}; not timed{why} (fuse.gate="measure" does)', estimate.node, "unmeasured")
    return Reject(estimate.reason, estimate.node, estimate.code)
