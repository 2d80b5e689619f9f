"""From what both forms of a match make a device do to whether it pays."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from fusebackend import cache_keys
from fusebackend import fx_utils as g
from fusebackend.profitability import triton_access, triton_reductions
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.inductor_kernels import generated_kernels
from fusebackend.profitability.kept_answers import KeptAnswers
from fusebackend.profitability.region import are_nearly_calls, cut_out, device_of
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Code, Estimate, Generated, Interval, Level, Work, Workload


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The kernels of both forms of a match, each in the ways that could be chosen for it.

    Attributes:
        inductor: None if that is not known.
        graphs: where they run: ``"forward"``, ``"backward"`` or, where both are replaced together, both.
        is_called: whether the original is library calls, apart from copies: the default gate times it where the estimate does not tell.
        pattern: which found it.
    """

    ours: list[list[Work]]
    inductor: list[list[Work]] | None
    graphs: frozenset[str]
    is_called: bool = False
    pattern: str = ""


#: Where both times are so many times their error apart, an estimate is enough: Inductor is not asked where a description of its kernels
#: says that it is faster (some, as that of a plain copy, are less than any kernel takes), and a replacement that pays is not timed.
_CLEAR = 3.0
#: Where a description of Inductor's kernels says by so many times the error that the replacement pays, Inductor is not asked.
_SURE = 2.0

#: How often a user may run what was compiled, at the least: by then what it took to find out what is faster must have paid for itself.
RUNS = 10_000
#: What pays for itself within so many is worth its time in however short a compile.
_SOON = 1_000
#: What compiling a region both ways may take, until it was done once.
COMPILE_SECONDS = 2.0
# To be timed each form is called about six times, and drawing the inputs takes about as long.
_CALLS = 12
# What it takes to ask Inductor. It is not measured: several ranks must decide alike.
_QUESTION_SECONDS = 0.25

#: What is being recorded, and the number of the alternative. Of the process, not of a thread or a context: on GPUs autograd compiles
#: backward graphs in a thread of its own.
_recordings: list[tuple[list[Recorded], int]] = []


@contextlib.contextmanager
def recording(alternative: int = 0) -> Iterator[list[Recorded]]:
    """A block in which every estimate says yes, in all threads, and notes the work instead: for calibrations.

    Args:
        alternative: the number of the way in which sites are replaced that can be replaced in several, counted around.
    """
    found: list[Recorded] = []
    _recordings.append((found, alternative))
    try:
        yield found
    finally:
        _recordings.pop()


class Estimator:
    """Estimates matches on one device. What Inductor generates for equal nodes is asked once.

    Args:
        calibration: None if nothing is known of the device.
        kept: answers of earlier processes.

    Attributes:
        questions: how many there were, answered by Inductor or by what is kept.
    """

    def __init__(self, calibration: Calibration | None, kept: KeptAnswers | None = None):
        self.questions = 0
        self._calibration = calibration
        self._kept = kept
        self._generated: dict[str, list[list[Work]] | str] = {}
        self._why_not_asked = ""

    def estimate(
        self,
        workloads: Sequence[Workload],
        level: Level,
        outputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node] = (),
        why_not_asked: str = "",
        pattern: str = "",
    ) -> Estimate:
        """Of the workload that gains most: it pays if the intervals of both times are apart. Where nothing is known of how long the match
        itself takes, it is what is offered, beside the best of its alternatives.

        Args:
            level, outputs, nodes: of the match.
            why_not_asked: why there are no new questions; empty where there may be.
            pattern: its name, for what is recorded.
        """
        self._why_not_asked = why_not_asked
        if _recordings:
            recorded, number = _recordings[-1]
            ways = [workloads[0], *(w for w in workloads[1:] if w.is_alternative)]
            way = ways[number % len(ways)]
            recorded.append(self._record(way, graphs=_graphs(level, outputs), is_called=are_nearly_calls(nodes), pattern=pattern))
            return Estimate(instead=way.match)
        surely = self._surely_faster(workloads)
        if surely is not None:
            return surely
        found = [_with_conditions(w, self._one(w)) for w in workloads]
        first, best = found[0], max(found, key=_gain)
        others = [e for e, w in zip(found, workloads) if w.is_alternative and e.pays is not False and e.ours and e.inductor]
        if first.pays is None and first.ours is None and best in [first, *others] and others:
            return dataclasses.replace(first, rival=max(others, key=_gain))
        return best

    def _surely_faster(self, workloads: Sequence[Workload]) -> Estimate | None:
        """Of the fastest of the ways to replace a whole site, where Inductor would be asked and a description is enough; None where it is
        not, or a way is not known without asking."""
        known, others = self._calibration, workloads[1:]
        if known is None or not _asks(workloads[0].inductor):
            return None
        if any(_asks(w.ours) or w.spared for w in workloads) or not all(w.is_alternative for w in others):
            return None
        times = [t for w in workloads if (t := _own_kernels(known, w)) is not None]
        if len(times) < len(workloads):
            return None
        ours, best = min(zip(times, workloads), key=lambda way: way[0].expected)
        described = self._described(known, best)
        if described is None or pays(ours, described, _SURE) is not True:
            return None
        return _with_conditions(best, dataclasses.replace(_verdict(best, ours, described), around=self._around(known, best)))

    def _one(self, workload: Workload) -> Estimate:
        if self._calibration is None:
            return Estimate(None, "nothing is known of this device: python -m fusebackend calibrate", "unmeasured", instead=workload.match)
        inductor, ours, why = None, None, ""
        least = _own_kernels(self._calibration, workload)
        described = None if least is None else self._described(self._calibration, workload)
        if least is not None and described is not None:
            if pays(least, described, _CLEAR) is False:
                return _slower(workload, f"{described} by Inductor as described, at least {least} here", least, described)
            if not _is_worth_asking(workload, least, described):
                return self._unasked(self._calibration, workload, least, described)
        try:
            inductor = total(self._calibration, self._original(workload))
        except Unfit as unfit:
            why = str(unfit)
        generated = self._generated_time(self._calibration, workload) if inductor is None else None
        if _asks(workload.ours):  # for what stands around the replacement, unless that can't change the answer
            if inductor is None and generated is None and _asks(workload.inductor):
                return Estimate(None, why, "unmeasured", None, workload.match)
            if inductor is not None and least is not None:
                if pays(least, inductor) is False or not ours_decides(least, inductor):
                    return _slower(workload, f"{inductor} by Inductor, at least {least} here", least, inductor)
                if not _is_worth_asking(workload, least, inductor):
                    return self._unasked(self._calibration, workload, least, inductor)
        try:
            ours = replacement(self._calibration, self._replacing(workload))
        except Unfit as unfit:
            why = why or str(unfit)
        around = self._around(self._calibration, workload)
        if inductor is not None and ours is not None:
            return dataclasses.replace(_verdict(workload, ours, inductor), around=around)
        return Estimate(None, why, "unmeasured", None, workload.match, ours, inductor, generated, around=around)

    def _unasked(self, known: Calibration, workload: Workload, least: Interval, inductor: Interval) -> Estimate:
        """By what is known without asking. Where that does not tell, the site is left to Inductor: timing takes longer than asking."""
        works = self._descriptions(workload.ours)
        with contextlib.suppress(Unfit):
            if works is not None:
                answer = _verdict(workload, replacement(known, works), inductor)
                if answer.pays is not None:
                    return answer
        reason = f"{inductor} by Inductor, at least {least} here: what may be gained is not worth asking what Inductor generates"
        return Estimate(False, reason, "estimated_slower", workload.neighbour, workload.match, least, inductor)

    def _described(self, known: Calibration, workload: Workload) -> Interval | None:
        """What the original takes by descriptions, or what Inductor is spared, where it would be asked; None if it would not, or they are
        not known."""
        works = self._descriptions(workload.spared or workload.inductor)
        if works is None or not _asks(workload.inductor):
            return None
        with contextlib.suppress(Unfit):
            return total(known, works)
        return None

    def _descriptions(self, works: Sequence[Work | Generated]) -> list[list[Work]] | None:
        """The works without asking, as the one way of a kernel each; None if one has no description."""
        found = [self._known(work) if isinstance(work, Work) else work.otherwise for work in works]
        known = [[work] for work in found if work is not None]
        return known if len(known) == len(found) else None

    def _generated_time(self, known: Calibration, workload: Workload) -> Interval | None:
        """The time of what Inductor generates for the original, without its library calls."""
        try:
            kernels = [kernel for work in workload.inductor if isinstance(work, Generated) for kernel in self._asked(work)]
            return total(known, kernels) if kernels else None
        except Unfit:
            return None

    def _record(self, workload: Workload, **of_match: Any) -> Recorded:
        try:
            return Recorded(self._replacing(workload), self._original(workload), **of_match)
        except Unfit:
            return Recorded([[work] for work in workload.ours if isinstance(work, Work)], None, **of_match)

    def _replacing(self, workload: Workload) -> list[list[Work]]:
        """The kernels of the replacement, each in its only way, and those that Inductor generates around it."""
        return [kernel for work in workload.ours for kernel in ([[work]] if isinstance(work, Work) else self._asked(work))]

    def _around(self, known: Calibration, workload: Workload) -> Interval | None:
        """The time of the kernels around a replacement, as far as it is known."""
        around = tuple(work for work in workload.ours if isinstance(work, Generated) or work.around)
        try:
            return total(known, self._replacing(dataclasses.replace(workload, ours=around))) if around else None
        except Unfit:
            return None

    def _original(self, workload: Workload) -> list[list[Work]]:
        """The kernels of the original, each in the ways that Inductor would try."""
        return [kernel for work in workload.inductor for kernel in ([[self._known(work)]] if isinstance(work, Work) else self._asked(work))]

    def _known(self, work: Work) -> Work:
        """The work as the calibration knows it. What is recorded for another is the work itself."""
        return work if self._calibration is None or _recordings else as_known(self._calibration, work)

    def _asked(self, work: Generated) -> list[list[Work]]:
        unknown = self._calibration is not None and triton_reductions.KIND not in self._calibration.models
        if work.otherwise is not None and unknown and not _recordings:  # of an older calibration
            return [[work.otherwise]]
        key = _key(work)
        if key not in self._generated:
            if self._why_not_asked and not _recordings:
                return self._described_instead(work, self._why_not_asked)
            self.questions += 1
            try:
                self._generated[key] = self._kept_or_asked(key, work)
            except Unfit as unfit:
                self._generated[key] = str(unfit)
            except Exception as error:
                if work.otherwise is None:
                    raise
                self._generated[key] = f"Inductor can't be asked: {type(error).__name__}: {error}"
        found = self._generated[key]
        if not isinstance(found, str):
            return [[self._known(_of_family(way, work)) for way in kernel] for kernel in found]
        return self._described_instead(work, found)

    def _described_instead(self, work: Generated, why_not: str) -> list[list[Work]]:
        """What is said of it without asking, as the one way of a kernel."""
        if work.otherwise is None:
            raise Unfit(why_not)
        return [[work.otherwise]]

    def _kept_or_asked(self, key: str, work: Generated) -> list[list[Work]]:
        if self._kept is None:
            return works_of(work)
        answer = self._kept.load(key, work.nodes)
        if answer is None:
            try:
                answer = works_of(work)
            except Unfit as unfit:
                if unfit.__cause__ is None:  # an error behind it, such as a lack of memory, may be gone tomorrow
                    self._kept.save(key, work.nodes, str(unfit))
                raise
            self._kept.save(key, work.nodes, answer)
        return answer


def as_known(calibration: Calibration, work: Work) -> Work:
    """The work, or the same as one of a more general kind where its own was not calibrated."""
    return work if work.otherwise is None or work.kind in calibration.models else work.otherwise


def _of_family(work: Work, asked: Generated) -> Work:
    """A generated kernel's work as that of a family's sites."""
    otherwise = None if asked.is_unlike_others else work
    return dataclasses.replace(work, kind=f"{work.kind} of {asked.family}", otherwise=otherwise) if asked.family else work


def works_of(work: Generated) -> list[list[Work]]:
    """The kernels that Inductor generates, each in the ways that it would try.

    Raises:
        Unfit: Inductor can't be asked.
    """
    kernels = generated_kernels(work.nodes, work.outputs, work.orders)
    multiprocessors = device_facts(device_of(work.outputs or work.nodes)).multiprocessors
    found = [triton_reductions.works(k, multiprocessors) if work.outputs or k.is_reduction else triton_access.works(k) for k in kernels]
    return triton_reductions.merged(found, g.inputs_of(work.nodes), work.outputs) if work.outputs else found


def _graphs(level: Level, outputs: Sequence[fx.Node]) -> frozenset[str]:
    """The graphs of a training step, after partitioning, that ``outputs`` are computed in."""
    if not g.is_joint(outputs[0].graph):
        return frozenset({"forward"})
    if level == "post_grad":
        return frozenset({"backward"})
    return frozenset("backward" if g.needs_gradients(n) else "forward" for n in outputs)


def _key(work: Generated) -> str:
    """Names what Inductor is asked: equal nodes at equal sizes, or hints of sizes, of which the same are wanted. Sums that are named are
    understood otherwise than what is read anyway."""
    try:
        asked = cut_out(work.nodes)
    except Unfit as unfit:
        return f"not asked: {unfit}"
    text = cache_keys.graph_text(asked.inputs, asked.original, work.outputs or asked.outputs, asked.symbols)
    return text + repr((list(asked.symbols.values()), [work.orders.get(n) for n in asked.inputs], bool(work.outputs)))


def total(calibration: Calibration, kernels: Sequence[Sequence[Work]], more: float = 0.0) -> Interval:
    """The time of kernels, each given in the ways that could be chosen for it, one after the other. Their errors are independent. Generated
    sums take at least as long as the memory needs for what they read.

    Raises:
        Unfit: a kind of work was not calibrated.
    """
    least = [min(triton_reductions.least_bytes(w) * w.share for w in ways) for ways in kernels]
    times = [calibration.time(ways).at_least(calibration.memory_us(n)) for ways, n in zip(kernels, least)]
    expected = sum(t.expected for t in times)
    error = math.hypot(*(t.expected * t.half_width for t in times)) / expected if expected > 0 else 0.0
    return Interval.around(expected + more, error)


def replacement(calibration: Calibration, kernels: Sequence[Sequence[Work]]) -> Interval:
    """The time of a replacement's kernels, with what calling it costs the host.

    Raises:
        Unfit: as for :func:`total`.
    """
    return total(calibration, kernels, _call_us(calibration))


def _call_us(calibration: Calibration) -> float:
    return 0.0 if inductor_config.triton.cudagraphs else calibration.call  # a CUDA graph calls nothing


def pays(ours: Interval, inductor: Interval, errors: float = 1.0) -> bool | None:
    """Whether two times are so far apart, ``errors`` times their error, that ours is less; None where they are too close to tell."""
    gain, error = math.log(inductor.expected / ours.expected), errors * math.hypot(inductor.half_width, ours.half_width)
    return True if gain > error else None if gain > -error else False


def pays_soon(ours: Interval | None, inductor: Interval | None, seconds: float) -> bool:
    """Whether the replacement is expected to gain ``seconds`` soon, which it takes to find out; not where a time is not known."""
    return ours is not None and inductor is not None and (inductor.expected - ours.expected) * _SOON >= seconds * 1e6


def calling_seconds(ours: Interval | None, inductor: Interval | None) -> float:
    """What timing calls of both forms takes at the most, as far as that is known."""
    return _CALLS * 1e-6 * sum(form.high for form in (ours, inductor) if form is not None)


def _asks(works: Sequence[Work | Generated]) -> bool:
    """Whether Inductor is asked for some of it."""
    return any(isinstance(work, Generated) for work in works)


def _is_worth_asking(workload: Workload, ours: Interval, inductor: Interval) -> bool:
    """Whether Inductor's answer may tell of a gain, at sites like this one in the same graph, that pays for asking.

    Args:
        ours: at least.
        inductor: as far as it is known.
    """
    asked = next(work for work in (*workload.inductor, *workload.ours) if isinstance(work, Generated))
    result = max(asked.outputs or asked.nodes)
    alike = (n for n in result.graph.find_nodes(op=result.op, target=result.target) if _is_like(n, result))
    gain, cost = (inductor.high - ours.low) * RUNS, _QUESTION_SECONDS * 1e6
    enough = math.ceil(cost / gain) if gain > 0 else 0  # of hundreds, which takes long to find out
    return gain * sum(1 for _ in itertools.islice(alike, enough)) >= cost


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    a, b = g.value(node), g.value(other)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dtype == b.dtype and g.hints(a.shape) == g.hints(b.shape)


def is_clear(estimate: Estimate) -> bool:
    """Whether a match pays by so much that its time need not be measured."""
    ours, inductor = estimate.ours, estimate.inductor
    return estimate.pays is True and ours is not None and inductor is not None and clearly_pays(ours, inductor)


def clearly_pays(ours: Interval, inductor: Interval) -> bool:
    """Whether ours is so much less than Inductor's time that it need not be measured."""
    return pays(ours, inductor, _CLEAR) is True


def _own_kernels(calibration: Calibration, workload: Workload) -> Interval | None:
    """What the replacement takes at least: its own kernels. None if it has none, or they are not known."""
    works = [[work] for work in workload.ours if isinstance(work, Work)]
    with contextlib.suppress(Unfit):
        return replacement(calibration, works) if works else None
    return None


def measured(calibration: Calibration | None, ours_ms: float, error: float) -> Interval:
    """The time of a replacement that was timed by itself, with what calling it costs the host.

    Args:
        error: the half width of the measured time, a logarithm.
    """
    call = _call_us(calibration) if calibration is not None else 0.0
    return Interval.around(1e3 * ours_ms + call, error)


def with_library_calls(generated: Interval, calls_ms: float, error: float) -> Interval:
    """The time of a form of which the library calls were timed, and what Inductor generates was estimated.

    Args:
        error: the half width of the measured time, a logarithm.
    """
    calls = 1e3 * calls_ms
    expected = calls + generated.expected
    return Interval.around(expected, math.hypot(calls * error, generated.expected * generated.half_width) / expected)


def ours_decides(ours: Interval | None, inductor: Interval | None) -> bool:
    """Whether a replacement would pay, did it take as little as it may: then its time is worth knowing."""
    return ours is not None and inductor is not None and pays(Interval.around(ours.low, 0.0), inductor) is True


def inductor_decides(ours: Interval | None, inductor: Interval | None) -> bool:
    """Whether a replacement would pay, did Inductor's form take as long as it may: then that time is worth knowing."""
    return ours is not None and inductor is not None and pays(ours, Interval.around(inductor.high, 0.0)) is True


def _with_conditions(workload: Workload, estimate: Estimate) -> Estimate:
    """The estimate with what timing would have to heed; a no where it does not tell, and timing would tell something else."""
    estimate = dataclasses.replace(estimate, orders=workload.orders)
    if not workload.untimed:
        return estimate
    estimate = dataclasses.replace(estimate, untimed=workload.untimed)
    if estimate.pays is not None:
        return estimate
    return dataclasses.replace(estimate, pays=False, reason=f"{estimate.reason}; {workload.untimed}")


def _gain(estimate: Estimate) -> tuple[int, float]:
    order = {True: 2, None: 1, False: 0}[estimate.pays]
    if estimate.ours is None or estimate.inductor is None:
        return order, 0.0
    return order, estimate.inductor.expected - estimate.ours.expected


def _slower(workload: Workload, times: str, ours: Interval, inductor: Interval) -> Estimate:
    """A refusal, of which the times are told."""
    return Estimate(False, f"Inductor is as fast or faster: {times}", "estimated_slower", None, workload.match, ours, inductor)


def _verdict(workload: Workload, ours: Interval, inductor: Interval) -> Estimate:
    answer = pays(ours, inductor)

    def estimate(pays: bool | None, reason: str = "", code: Code = "estimated_slower", node: fx.Node | None = None) -> Estimate:
        return Estimate(pays, reason, code, node, workload.match, ours, inductor)

    if answer:
        return estimate(True)
    times = f"{inductor} by Inductor, {ours} here"
    if answer is None:
        return estimate(None, f"estimates are too close to tell: {times}", "unmeasured", workload.neighbour)
    if workload.neighbour is not None:
        reason = f"Inductor fuses it with its neighbour {g.describe(workload.neighbour)}: {times}"
        return estimate(False, reason, "fused_neighbour", workload.neighbour)
    return _slower(workload, times, ours, inductor)
