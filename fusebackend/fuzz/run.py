"""The loop: draws programs from seeds and checks them; shrinks failures, and saves them as files that run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

from fusebackend.fuzz.compare import Comparison, check
from fusebackend.fuzz.imagined_gpu import IMAGINED_DEVICE
from fusebackend.fuzz.programs import Program
from fusebackend.fuzz.random_programs import programs
from fusebackend.garbage import collection_paused
from fusebackend.tools.object_reference import UsageError

#: The number of programs of one seed; the next programs have the next seed.
CHUNK = 100

#: What ``device`` accepts.
DEVICES = ("cpu", "cuda", IMAGINED_DEVICE)

#: At most so many programs are tried to make a failure smaller.
SHRINK_TRIES = 300


@dataclasses.dataclass
class Result:
    """The result of a run of the fuzzer.

    Attributes:
        programs: how many were compared.
        substituted: how many of them had at least one substitution.
        codegen: how many of them went through Inductor's code generation.
        families: pattern -> programs in which it substituted something.
        substitutions: pattern -> substitutions.
        kinds: kind -> programs of that kind, and those of them with a substitution.
        skipped: how many eager refused.
        unjudged: how many have no reference in float64, so that their floating-point values were not judged.
        inductors: in how many Inductor differs from eager without this package.
        seconds: the duration of the run.
        wrong: (program, comparison, with code generation) of every failure, shrunk.
    """

    programs: int = 0
    substituted: int = 0
    codegen: int = 0
    families: Counter = dataclasses.field(default_factory=Counter)
    substitutions: Counter = dataclasses.field(default_factory=Counter)
    kinds: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    unjudged: int = 0
    inductors: int = 0
    seconds: float = 0.0
    wrong: list[tuple[Program, Comparison, bool]] = dataclasses.field(default_factory=list)

    def add(self, program: Program, comparison: Comparison, codegen: bool) -> None:
        if comparison.skipped:
            self.skipped += 1
            return
        self.programs += 1
        self.codegen += codegen
        self.substituted += bool(comparison.counts)
        self.families.update(comparison.counts.keys())
        self.substitutions.update(comparison.counts)
        self.unjudged += bool(comparison.unjudged)
        self.inductors += bool(comparison.inductors)
        for kind in program.kinds:
            counted = self.kinds.setdefault(kind, [0, 0])
            counted[0] += 1
            counted[1] += bool(comparison.counts)

    def __str__(self) -> str:
        rate = 1000 * self.seconds / max(self.programs, 1)
        families = ", ".join(f"{name} {n}" for name, n in sorted(self.families.items()))
        share = 100 * self.substituted / max(self.programs, 1)
        return (
            f"{self.programs} programs ({self.codegen} through code generation), {len(self.wrong)} wrong; {self.substituted}"
            f" ({share:.0f} %) with a substitution: {families}; {self.inductors} where Inductor alone differs from eager;"
            f" {self.unjudged} whose values were not judged, as float64 gives no reference;"
            f" {self.skipped} refused by eager; {rate:.0f} ms a program"
        )

    def by_kind(self) -> str:
        """How many programs there were of each kind, and how many of them had a substitution."""
        return "\n".join(f"  {kind}: {n} programs, {s} with a substitution" for kind, (n, s) in sorted(self.kinds.items()))


class Wrong(AssertionError):
    """``fuse`` computes a program wrongly."""

    def __init__(self, program: Program, comparison: Comparison, codegen: bool):
        super().__init__(f"{comparison}\n\n{program.source()}")
        self.program, self.comparison, self.codegen = program, comparison, codegen


def fuzz(
    *,
    count: int | None = None,
    minutes: float | None = None,
    start: int = 0,
    device: str = "cpu",
    codegen_every: int = 0,
    save_to: Path | None = None,
    most_failures: int = 5,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Checks programs until ``count`` were compared, ``minutes`` have passed, or ``most_failures`` were found.

    Args:
        device: as for :func:`fusebackend.fuzz.compare.check`.
        start: the seed of the first 100 programs. The same arguments draw the same programs.
        codegen_every: one of so many programs goes through Inductor's code generation, which takes seconds; 0 for none.
        save_to: a folder for failures. The program that runs is in it as ``unfinished_<device>_<process>.py``, which stays if the process
            dies of it, by a device-side assertion say.
        say: called with lines about the progress.

    Raises:
        UsageError: an argument out of its range, or a device that torch does not see.
    """
    _check_arguments(count, minutes, start, device, codegen_every)
    result, began = Result(), time.monotonic()
    made = save_to is not None and not save_to.exists()
    until = began + (60 * minutes if minutes is not None else float("inf"))
    chunk = 0
    while len(result.wrong) < most_failures:
        result.seconds = time.monotonic() - began
        most = CHUNK if count is None else min(CHUNK, count - result.programs)
        if most <= 0 or time.monotonic() > until:
            break
        with _cheap_compiles(), _without_onednn():
            failure = _chunk(result, start + chunk, most, device, codegen_every, until, save_to)
        chunk += 1
        if failure is not None:
            result.wrong.append((failure.program, failure.comparison, failure.codegen))
            say(f"WRONG, seed {start + chunk - 1}: {failure}")
            if save_to is not None:
                path = save_to / f"fuzz_{device}_{start + chunk - 1}.py"
                comment = f"Found by the fuzzer (seed {start + chunk - 1}):\n{failure.comparison}"
                path.write_text(failure.program.file(comment, device, failure.codegen))
                say(f"saved as {path}")
        say(f"seeds {start} to {start + chunk - 1}: {result}")
    if save_to is not None and made:
        with contextlib.suppress(OSError):  # nothing was saved in it, or it was never made
            save_to.rmdir()
    result.seconds = time.monotonic() - began
    return result


def _check_arguments(count: int | None, minutes: float | None, start: int, device: str, codegen_every: int) -> None:
    ranges = {
        "count": (count is None or count >= 1, count, "a number of programs from 1 on"),
        "minutes": (minutes is None or 0 < minutes < float("inf"), minutes, "a number above 0"),
        "start": (start >= 0, start, "a seed from 0 on"),
        "codegen_every": (codegen_every >= 0, codegen_every, "a number from 0 on"),
        "device": (device in DEVICES, device, " or ".join(map(repr, DEVICES))),
    }
    for name, (accepted, value, what) in ranges.items():
        if not accepted:
            raise UsageError(f"fuzz: {name} takes {what}, got {value!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("fuzz: torch sees no GPU: device takes 'cpu' or 'imagined' here, got 'cuda'")
    if device == IMAGINED_DEVICE and codegen_every:
        raise UsageError(f"fuzz: codegen_every takes 0 with device='imagined', for which no code can be generated; got {codegen_every}")


@contextlib.contextmanager
def _cheap_compiles() -> Iterator[None]:
    """The garbage collector and the cache of fake tensors are off. They take a large part of a small compile, and programs that are all
    different never hit that cache."""
    with collection_paused(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's code generator for 16-bit depthwise convolutions may never return, depending on what lies in memory (torch 2.13, in eager
    mode), and a loop in C++ can't be interrupted."""
    enabled, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(enabled)


class _Broken(BaseException):
    """The GPU or the fuzzer itself failed. Hypothesis would run other programs to shrink an Exception; this one passes it."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def _recorded(program: Program, seed: int, device: str, codegen: bool, save_to: Path | None) -> Iterator[None]:
    """The program stands in a file while it runs."""
    if save_to is None:
        yield
        return
    save_to.mkdir(parents=True, exist_ok=True)
    path = save_to / f"unfinished_{device}_{os.getpid()}.py"
    path.write_text(program.file(f"The fuzzer ran this program (seed {seed}) when its process ended.", device, codegen))
    try:
        yield
        if device == "cuda":  # after a device-side assertion every call raises, and this is still the program that caused it
            torch.cuda.synchronize()
    except KeyboardInterrupt:
        path.unlink()
        raise
    path.unlink()


class Uniform(PrimitiveProvider):
    """A backend of Hypothesis that draws every choice uniformly. The default one mostly mutates what it drew before: that finds rare
    values of one type, but gives many programs of one kind here. Shrinking stays with Hypothesis."""

    start = 0

    def __init__(self, data):
        super().__init__(data)
        self._random = random.Random(self.start)

    def draw_integer(self, min_value=None, max_value=None, *, weights=None, shrink_towards=0):
        return self._random.randint(min_value, max_value)

    def draw_boolean(self, p=0.5):
        return self._random.random() < p

    def _not_drawn(self, *_, **__):
        raise NotImplementedError("programs are drawn as integers")

    draw_float = draw_string = draw_bytes = _not_drawn


def _chunk(result: Result, number: int, count: int, device: str, codegen_every: int, until: float, save_to: Path | None) -> Wrong | None:
    """Checks ``count`` programs of the seed ``number``, or fewer if time runs out; returns the smallest failure, if any."""
    drawn = tried = 0
    failures: dict[Program, Wrong] = {}
    AVAILABLE_PROVIDERS["fusebackend"] = type("Seeded", (Uniform,), {"start": number})

    @hypothesis_settings(
        backend="fusebackend",
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(programs(device))
    def run(program: Program) -> None:
        nonlocal drawn, tried
        if program not in failures:  # Hypothesis runs the smallest failure again at the end
            codegen = bool(codegen_every) and result.programs % codegen_every == codegen_every - 1
            drawn += not failures
            tried += bool(failures)
            if tried > SHRINK_TRIES or (time.monotonic() > until and not failures):
                return
            if (drawn + tried) % 50 == 0:
                gc.collect()
            try:
                with _recorded(program, number, device, codegen, save_to):
                    comparison = check(program, device, codegen)
            except Exception as error:
                raise _Broken(error) from error
            if not failures:
                result.add(program, comparison, codegen)
            if not comparison.wrong:
                return
            failures[program] = Wrong(program, comparison, codegen)
        raise failures[program]

    try:
        run()
    except Wrong as failure:
        return failure
    except _Broken as broken:
        raise broken.error from None
    return None
