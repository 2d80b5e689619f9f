"""Decides whether a substitution pays: ``options={"fuse.gate": ...}``.

The user's choice comes first (``"off"`` applies every legal match, and none of this is asked), then a measurement that is kept, then the
pattern's estimate, then a new measurement, and where there is none the site is left to Inductor.

``"auto"``     Kept measurements and estimates decide. On CUDA something may be timed too, in milliseconds, as long as that stays under a
               tenth of the compile so far: where an estimate does not say no, and Inductor would call a library for the match, both
               forms are called; where it does not tell, and Inductor would generate code too, the replacement is called, and the library
               calls among what it replaces: it pays if it takes less than these, or than the estimate of the other form.
``"measure"``  Every region, with the neighbours that Inductor could fuse, is compiled by Inductor both ways and timed. Where both forms
               are library calls, with which Inductor fuses nothing, they are called as they are.
``"race"``     In addition every graph that was rewritten is compiled both ways: before the partitioner forward and backward as one step
               (:mod:`fusebackend.profitability.joint_race`), then each by itself (:mod:`fusebackend.profitability.graph_race`).

A measurement is kept on disk under the region's operators, shapes, strides, dtypes, the kind of device and the versions of everything
that made the code, so equal regions of a model are timed once, and those of the next process not at all. Whatever goes wrong while
timing leaves the decision to the estimate, with the reason in the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.log import log, warn_once
from fusebackend.native import cache, loader
from fusebackend.profitability import calibration, measurement_store
from fusebackend.profitability.budget import Budget
from fusebackend.profitability.decision_record import DecisionRecord
from fusebackend.profitability.distributed import Answer, Exchange, Ranks, has_several_ranks
from fusebackend.profitability.estimating import Estimator, ours_decides, pays_measured
from fusebackend.profitability.fresh_inputs import symbols_of
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.profitability.region import Region, are_nearly_calls, device_of, extract, library_calls
from fusebackend.profitability.region_timing import MARGIN, time_region, time_replacement
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting import describe
from fusebackend.rewriting.outcome import Source, Verdict
from fusebackend.rewriting.pattern import Estimate, Interval, Match, Pattern, Reject, Workload
from fusebackend.rewriting.profitability_policy import Decision, Proposal


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
        self._patches = patches
        self._timing = timing
        self._strict = strict
        self._answers: dict[str, Answer] = {}  # by region, of this compile
        self._measured_sites: frozenset[str] | None = None
        self._contexts: dict[tuple, str] = {}
        self._identities: dict[Pattern, str | None] = {}
        self._estimators: dict[torch.device, Estimator] = {}
        self._ranks = Ranks(seconds + 60) if mode != "auto" and timing else None

    def estimate(self, pattern: Pattern, match: Match) -> Estimate:
        """What the pattern says, or what the device's calibration makes of the work that it describes."""
        answer = pattern.estimate(match)
        if isinstance(answer, Estimate):
            return answer
        device = device_of(match.outputs)
        if device not in self._estimators:
            self._estimators[device] = Estimator(calibration.of_device(device))
        return self._estimators[device].estimate([answer] if isinstance(answer, Workload) else answer, pattern.level, match.outputs)

    def refuse_unbuilt(self, proposal: Proposal) -> Reject | None:
        """In mode ``"auto"`` an estimate refuses a match where no measurement of it is kept and none would be taken."""
        proposal = _without_guesses(proposal)
        if self.mode != "auto" or proposal.estimate.pays:
            return None
        try:
            device = device_of(proposal.match.outputs)
            why_not_timed = self._why_not_by_default(proposal.match.nodes, device, proposal.estimate)
            if why_not_timed is None:
                return None
            site = self._site(proposal, device)
        except Exception:
            return None  # raised again, and reported, once the replacement is built
        if self._measured_sites is None:
            self._measured_sites = measurement_store.sites()
        if site in self._measured_sites:
            return None
        self.record.add_refused_unbuilt(site)
        return _refusal(proposal.estimate, why_not_timed)

    def decide(self, proposal: Proposal, new_outputs: Sequence[fx.Node], emitted: Sequence[fx.Node]) -> Decision:
        """Decides by a kept measurement, by a new one, or by the estimate."""
        proposal = _without_guesses(proposal)
        match, estimate, key = proposal.match, proposal.estimate, None
        try:
            region = extract(match.nodes, emitted, dict(zip(match.outputs, new_outputs)), estimate.orders)
            key = region.key(self._site(proposal, device_of(match.outputs)), self.measured_with(region.device, proposal.pattern))
            known = self._answers.get(key)
            if known is None:
                answer = self._asked(key, region, proposal, f"{proposal.pattern.name} {describe.shapes(match.outputs, emitted)}")
                self._answers[key] = Answer(answer.measurement, "as above" if answer.measurement is not None else answer.why)
            else:
                answer = known
        except Exception as error:
            answer = Answer(None, self.why_failed("timing", error))
        measurement = answer.measurement
        if measurement is not None:
            refusal = None if measurement.kept else Reject(str(measurement), code="measured_slower")
        else:
            refusal = None if estimate.pays else _refusal(estimate)
        if key is not None:
            self.record.add(key, refusal is None, estimate.pays is True, measurement is not None)
        if measurement is None and not answer.why:
            return Decision(refusal)
        source = describe.source_of(match.outputs[0])
        return Decision(refusal, verdict_of(proposal.pattern.name, proposal.graph, source, answer, refusal is None))

    def _asked(self, key: str, region: Region, proposal: Proposal, subject: str) -> Answer:
        """What is known of both forms of a region, or becomes known now."""
        estimate, kept = proposal.estimate, self.are_identified([proposal.pattern])
        ask = functools.partial(self.ask, key, lambda: self._time(region, subject), calls=region.is_calls, kept=kept)
        if self.mode != "auto":
            return ask(self.budget.why_spent() if self._timing else "not timed: nothing is compiled here")
        why_not = self._why_not_by_default(region.core, region.device, estimate)
        unmentioned = None if why_not is None else ""  # the refusal says it
        if region.is_nearly_calls:
            return ask(unmentioned)
        answer = ask("")
        if answer.measurement is not None or why_not == "":
            return answer
        return self._asked_alone(key, region, estimate.inductor, subject, unmentioned, kept)

    def _asked_alone(
        self, key: str, region: Region, inductor: Interval | None, subject: str, why_not_timed: str | None, kept: bool
    ) -> Answer:
        """How long the replacement takes by itself, and whether that is less than the library calls of the original, or than the estimate
        of all of it."""
        # Under a key of its own, since the other modes want both times. What follows from the estimate is not kept: the next calibration
        # may give another.
        answer = self.ask(f"{key}-alone", lambda: time_replacement(region, subject), why_not_timed, kept=kept)
        measured = answer.measurement
        if measured is None:
            return answer
        if measured.kept:
            return Answer(measured, f"{answer.why}; of Inductor's form the library calls alone")
        if inductor is None:
            return Answer(None, f"{measured}; how long the rest of Inductor's form takes is not known")
        pays = pays_measured(calibration.of_device(region.device), measured.replaced_ms, inductor, math.log(MARGIN))
        return Answer(
            dataclasses.replace(measured, kept=pays, inductor_ms=inductor.expected / 1e3, how="estimate"),
            f"{answer.why}; Inductor's form as estimated",
        )

    def ask(
        self, key: str, timed: Callable[[], Measurement], why_not_timed: str | None, *, calls: bool = False, kept: bool = True
    ) -> Answer:
        """What is known under that key, by rank 0, from an earlier compile, or by timing it now.

        Args:
            timed: takes the measurement.
            why_not_timed: why it may not be taken now; None where it may.
            calls: whether calling both forms as they are is a measurement also where regions are compiled.
            kept: whether measurements are read and written; not where a pattern may be another one under the same name tomorrow.
        """
        with self._ranks.agreed(key) if self._ranks else contextlib.nullcontext(Exchange()) as exchange:
            if exchange.received is not None:
                if exchange.received.measurement is not None and kept:  # for the next process, where ranks share no disk
                    measurement_store.save(key, exchange.received.measurement)
                return exchange.received
            answer = Answer(self._look_up(key) if kept else None, "cached")
            if answer.measurement is None or (answer.measurement.how == "calls" and self.mode != "auto" and not calls):
                answer = self._measured(key, timed, kept) if why_not_timed is None else Answer(None, why_not_timed)
            exchange.send(Answer(answer.measurement, f"{answer.why}, by rank 0" if answer.why else ""))
            return answer

    def measured_with(self, device: torch.device, *patterns: Pattern) -> str:
        """What measurements depend on besides the graph (:func:`fusebackend.cache_keys.measuring`)."""
        name = (device, *(p.name for p in patterns))
        if name not in self._contexts:
            self._contexts[name] = cache_keys.measuring(
                cache_keys.machine(device),
                loader.load().key,
                self._inductor_settings,
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

    def close(self) -> None:
        """At the end of each graph: ends the progress line, and looks for new measurements on disk at the next."""
        self.budget.close()
        self._measured_sites = None

    def _site(self, proposal: Proposal, device: torch.device) -> str:
        match = proposal.match
        nodes, inputs = sorted(set(match.nodes)), g.inputs_of(match.nodes)
        text = cache_keys.graph_text(inputs, nodes, match.outputs, symbols_of(inputs))
        return cache_keys.site(self.measured_with(device, proposal.pattern), text, match.note)

    def _look_up(self, key: str) -> Measurement | None:
        try:
            return measurement_store.load(key)
        except cache.CacheError as error:
            log.debug("no kept verdicts: %s", error)
            return None

    def _measured(self, key: str, timed: Callable[[], Measurement], kept: bool) -> Answer:
        try:
            with self.budget.spending():
                measurement = timed()
        except Exception as error:
            return Answer(None, self.why_failed("timing", error))
        if kept:
            measurement_store.save(key, measurement)
        return Answer(measurement, "measured")

    def _time(self, region: Region, subject: str) -> Measurement:
        by_default = self.mode == "auto"
        if not by_default:
            self.budget.show(subject)
        return time_region(region, subject, calls=by_default or region.is_calls, brief=by_default, patches=self._patches)

    def _why_not_by_default(self, core: Sequence[fx.Node], device: torch.device, estimate: Estimate) -> str | None:
        """None where something of a match may be timed for which nobody asked; otherwise why not, empty where that goes without saying."""
        # A call on the CPU may take seconds. Several ranks must decide alike, and none may wait by default.
        possible = self._timing and estimate.pays is not False and device.type == "cuda" and not has_several_ranks()
        tells = are_nearly_calls(core) or (estimate.pays is None and (ours_decides(estimate) or bool(library_calls(core))))
        if not possible or not tells:
            return ""
        return self.budget.why_default_spent()


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
