"""Decides whether a substitution pays, by what was timed: ``options={"fuse.gate": ...}``.

``"auto"``     A kept verdict of an earlier timing decides. Without one, a match for which Inductor would call a library is
               timed on CUDA, call against call (milliseconds), as long as that stays under a twentieth of the compile so far.
               Everything else rests on the pattern's static guards, which say where they can't tell (``Match.unproven``).
``"measure"``  Every region, with the neighbours that Inductor could fuse, is compiled by Inductor both ways and timed. Where
               both forms are library calls, with which Inductor fuses nothing, they are called as they are.
``"race"``     In addition every graph that was rewritten is compiled both ways (:mod:`fusebackend.profitability.graph_race`).
``"off"``      Every match is applied.

A verdict is kept on disk under the region's operators, shapes, strides, dtypes, the kind of device and the versions of
everything that made the code, so equal regions of a model are timed once, and those of the next process not at all.
Whatever goes wrong while timing leaves the static decision, with the reason in the report.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V

from fusebackend.log import log, warn_once
from fusebackend.native import cache, loader
from fusebackend.profitability import verdict_store as verdicts
from fusebackend.profitability.decision_record import Record
from fusebackend.profitability.distributed import Agreement, Ranks, are_several
from fusebackend.profitability.random_inputs import Samples, Unfit
from fusebackend.profitability.region import Region, compile_apart, extract
from fusebackend.profitability.timer import medians_ms, undisturbed
from fusebackend.profitability.verdict_store import Verdict
from fusebackend.report import model as report
from fusebackend.rewriting.pattern import Estimate, Match, Pattern, Reject

#: A replacement must be this much faster to be kept: less may be noise, and is not worth a difference.
MARGIN = 1.05

# What "auto" may spend: a share of the time since the compile began; not more, since a backward may be compiled much later.
_AUTO_SHARE, _AUTO_SECONDS = 0.05, 10.0


class Gate:
    """The gate of one compile.

    Args:
        mode: ``"auto"``, ``"measure"`` or ``"race"``.
        seconds: how long this compile may spend on timing; looked at before each.
        result: where verdicts are reported.
        patches: the Inductor configuration without our passes, under which regions are compiled.
        record: remembers this compile's decisions for the key of Inductor's caches.
        timing: whether anything may be timed; otherwise only kept verdicts decide.
        strict: raise what goes wrong instead of leaving the static decision.
    """

    def __init__(
        self,
        mode: str,
        seconds: float,
        result: report.Report,
        patches: dict[str, Any],
        record: Record | None = None,
        *,
        timing: bool = True,
        strict: bool = False,
    ):
        self.mode = mode
        self.patches = patches
        self.record = record or Record()
        self.spent = 0.0
        self._seconds = seconds
        self._result = result
        self._timing = timing
        self._strict = strict
        self._began = time.perf_counter()
        self._known: dict[str, tuple[Verdict | None, str]] = {}
        self._salts: dict[str, str] = {}
        self._ranks = Ranks(seconds + 60) if mode != "auto" and timing else None
        self._progress = contextlib.ExitStack()
        self._show: Callable[[str], None] | None = None

    def refusal(self, pattern: Pattern, graph: str, match: Match, new: Sequence[fx.Node], emitted: Sequence[fx.Node]) -> Reject | None:
        """Why the replacement ``emitted``, which stands beside the original already, is not to take its place; None if it is."""
        verdict, why, key = None, "", None
        estimate = pattern.estimate(match)
        try:
            region = extract(match.nodes, emitted, dict(zip(match.outputs, new)))
            key = region.key(self.salt(region.device, pattern))
            if key not in self._known:
                subject = f"{pattern.name} {report.shapes(match.outputs, emitted)}"
                known = self.decide(key, lambda: self._time(region, subject), self._can_time(region, estimate), calls=region.is_calls)
                verdict, why = known
                self._known[key] = verdict, "as above" if verdict is not None else why
            else:
                verdict, why = self._known[key]
        except Exception as error:
            why = self.fault("timing", error)
        if verdict is not None:
            refused = None if verdict.kept else Reject(str(verdict), code="measured_slower")
        elif estimate.pays is None:
            refused = Reject(f'{estimate.reason}; not timed (fuse.gate="measure" does)', estimate.node, "unmeasured")
        else:
            refused = None if estimate.pays else Reject(estimate.reason, estimate.node, estimate.code)
        if key is not None:
            self.record.add(key, refused is None, estimate.pays is True, verdict is not None)
        if verdict is not None or why:
            self.note(report.Verdict.of(pattern.name, graph, report.source_of(match.outputs[0]), verdict, refused is None, why))
        return refused

    def decide(self, key: str, timed: Callable[[], Verdict], may: bool | str, calls: bool = False) -> tuple[Verdict | None, str]:
        """The verdict of that key and where it comes from.

        Args:
            timed: makes it.
            may: whether it may be made now, or why not.
            calls: whether calling both forms as they are says enough, also where regions are measured.
        """
        with self._ranks.agreed(key) if self._ranks else contextlib.nullcontext(Agreement()) as agreement:
            if agreement.given is not None:
                if agreement.given.verdict is not None:  # where ranks share no disk, the next process has it here
                    verdicts.save(key, agreement.given.verdict)
                return agreement.given.verdict, agreement.given.why
            verdict, why = self._look_up(key), "cached"
            if verdict is None or (verdict.how == "calls" and self.mode != "auto" and not calls):
                verdict, why = self._timed(key, timed, may)
            agreement.give(verdict, f"{why}, by rank 0" if why else why)
            return verdict, why

    def _look_up(self, key: str) -> Verdict | None:
        try:
            return verdicts.load(key)
        except cache.CacheError as error:
            log.debug("no kept verdicts: %s", error)
            return None

    def _timed(self, key: str, timed: Callable[[], Verdict], may: bool | str) -> tuple[Verdict | None, str]:
        if may is not True:
            return None, may or ""
        began = time.perf_counter()
        try:
            verdict = timed()
        except Exception as error:
            return None, self.fault("timing", error)
        finally:
            self.spent += time.perf_counter() - began
        verdicts.save(key, verdict)
        return verdict, "measured"

    def _can_time(self, region: Region, estimate: Estimate) -> bool | str:
        if not self._timing:
            return "" if self.mode == "auto" else "not timed: nothing is compiled here"
        if self.mode == "auto":
            if estimate.pays is False:
                return False
            allowed = min(self._seconds, _AUTO_SECONDS, _AUTO_SHARE * (time.perf_counter() - self._began))
            # On the CPU a library's call may take seconds. Several ranks must decide alike, and none may wait by default.
            return region.device.type == "cuda" and region.is_nearly_calls and self.spent < allowed and not are_several()
        return self.within_budget()

    def within_budget(self) -> bool | str:
        """True, or why nothing more is timed in this compile."""
        if self.spent < self._seconds:
            return True
        return f"not timed: the {self._seconds:g} s of fuse.gate_seconds are spent"

    def _time(self, region: Region, subject: str) -> Verdict:
        if region.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unfit("a CUDA graph is being captured")
        calls = self.mode == "auto" or region.is_calls
        if self.mode != "auto":
            self.progress(subject)
        if V.aot_compilation:
            raise Unfit("nothing can be compiled besides in an ahead-of-time compile")
        with undisturbed(region.device):
            original, replaced, fakes = (region.without_neighbours() if calls else region).modules()
            samples = Samples(original.graph, fakes)
            if calls:
                ways = [lambda inputs, module=module: module.forward(*inputs) for module in (replaced, original)]
            else:
                ways = [compile_apart(module, fakes, self.patches) for module in (replaced, original)]
            long = {"seconds": 0.03, "draws": 1} if self.mode == "auto" else {}
            ours, theirs = medians_ms(ways, samples, region.device, **long)
        return Verdict(ours * MARGIN <= theirs, ours, theirs, "calls" if calls else "region", subject, machine(region.device))

    def salt(self, device: torch.device, *patterns: Pattern) -> str:
        """What a verdict depends on besides its graph: machine, versions, patterns, settings of this process."""
        name = f"{device} {' '.join(p.name for p in patterns)}"
        if name not in self._salts:
            plain = (bool, int, float, str, type(None))
            settings = {k: v for k, v in inductor_config.save_config_portable().items() if isinstance(v, plain)}
            parts = (
                machine(device),
                torch.__version__,
                loader.load().key,
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
                sorted(settings.items()),
                [p.fingerprint() for p in patterns],
            )
            self._salts[name] = hashlib.sha256(repr(parts).encode()).hexdigest()
        return self._salts[name]

    def note(self, verdict: report.Verdict) -> None:
        self._result.verdicts.append(verdict)
        log.info("%s in %s at %s: %s", verdict.pattern, verdict.graph, verdict.source, verdict)

    def fault(self, doing: str, error: Exception) -> str:
        """The reason that goes into the report where something can't be timed."""
        if isinstance(error, Unfit):
            return f"not timed: {error}"
        if self._strict:
            raise error
        reason = f"not timed: {doing} raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        warn_once(f"{reason} (the static decision stays; fuse.strict=True raises)")
        return reason

    def progress(self, what: str) -> None:
        """Shows what is being timed."""
        if self._show is None:
            self._show = self._progress.enter_context(loader.progress_line("timing"))
        self._show(f"{what} ({self.spent:.0f} s of at most {self._seconds:g})")

    def close(self) -> None:
        """Ends the progress line; at the end of each graph."""
        self._progress.close()
        self._show = None


def machine(device: torch.device) -> str:
    """The kind of device, as verdicts are kept by it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}"
    return f"{_cpu_name()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"
