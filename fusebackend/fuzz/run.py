"""The loop: programs from a seed, checked one after another; failures shrunk and saved as files that run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

from fusebackend.fuzz.build import programs
from fusebackend.fuzz.compare import Verdict, check
from fusebackend.fuzz.programs import Program

CHUNK = 100  # programs of one seed, the next have the next
SHRINKING = 300  # programs that are tried to make a failure smaller


@dataclasses.dataclass
class Result:
    """What a run of the fuzzer came to.

    Attributes:
        programs: how many were compared.
        substituted: how many of them had at least one substitution.
        families: pattern -> programs in which it substituted something.
        substitutions: pattern -> substitutions.
        skipped: how many eager refused.
        inductors: in how many Inductor differs from eager without us.
        wrong: (program, verdict) of every failure, shrunk.
    """

    programs: int = 0
    substituted: int = 0
    codegen: int = 0
    families: Counter = dataclasses.field(default_factory=Counter)
    substitutions: Counter = dataclasses.field(default_factory=Counter)
    skipped: int = 0
    inductors: int = 0
    seconds: float = 0.0
    wrong: list[tuple[Program, Verdict, bool]] = dataclasses.field(default_factory=list)

    def add(self, verdict: Verdict, codegen: bool) -> None:
        if verdict.skipped:
            self.skipped += 1
            return
        self.programs += 1
        self.codegen += codegen
        self.substituted += bool(verdict.counts)
        self.families.update(verdict.counts.keys())
        self.substitutions.update(verdict.counts)
        self.inductors += bool(verdict.inductors)

    def __str__(self) -> str:
        rate = 1000 * self.seconds / max(self.programs, 1)
        families = ", ".join(f"{name} {n}" for name, n in sorted(self.families.items()))
        share = 100 * self.substituted / max(self.programs, 1)
        return (
            f"{self.programs} programs ({self.codegen} through code generation), {len(self.wrong)} wrong; {self.substituted}"
            f" ({share:.0f} %) with a substitution: {families}; {self.inductors} where Inductor alone differs from eager;"
            f" {self.skipped} refused by eager; {rate:.0f} ms a program"
        )


class Wrong(AssertionError):
    """A program that ``fuse`` computes wrongly."""

    def __init__(self, program: Program, verdict: Verdict, codegen: bool):
        super().__init__(f"{verdict}\n\n{program.source()}")
        self.program, self.verdict, self.codegen = program, verdict, codegen


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
    """Checks programs until there were ``count``, or ``minutes`` are over, or ``most_failures`` were found.

    Args:
        start: the seed of the first chunk; the same arguments draw the same programs.
        codegen_every: every so many programs one goes through Inductor's code generation (seconds each); 0 for none.
        save_to: a folder for failures.
        say: told about progress.
    """
    result, began = Result(), time.monotonic()
    until = began + (60 * minutes if minutes is not None else float("inf"))
    chunk = 0
    while len(result.wrong) < most_failures:
        result.seconds = time.monotonic() - began
        left = CHUNK if count is None else min(CHUNK, count - result.programs)
        if left <= 0 or time.monotonic() > until:
            break
        with _faster(), _without_onednn():
            failure = _chunk(result, start + chunk, left, device, codegen_every, until)
        chunk += 1
        if failure is not None:
            result.wrong.append((failure.program, failure.verdict, failure.codegen))
            say(f"WRONG, seed {start + chunk - 1}: {failure}")
            if save_to is not None:
                path = save_to / f"fuzz_{device}_{start + chunk - 1}.py"
                save_to.mkdir(parents=True, exist_ok=True)
                comment = f"Found by the fuzzer (seed {start + chunk - 1}):\n{failure.verdict}"
                path.write_text(failure.program.file(comment, device, failure.codegen))
                say(f"saved as {path}")
        say(f"seeds {start} to {start + chunk - 1}: {result}")
    result.seconds = time.monotonic() - began
    return result


@contextlib.contextmanager
def _faster() -> Iterator[None]:
    """A third of a small compile is the garbage collector, and a cache of fake tensors that programs which are all
    different never hit."""
    gc.disable()
    try:
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's code generator for depthwise convolutions in 16 bits may never end, by what lies in memory (torch 2.13,
    seeds 700031 and 840000, with nothing of ours called), and a loop in C++ can't be interrupted."""
    enabled, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(enabled)


class Uniform(PrimitiveProvider):
    """Draws every choice uniformly: a Hypothesis backend. Its own one mutates what it drew before, most of the time,
    which is good for rare values of one type and gives ten programs of one kind here. Shrinking stays Hypothesis's."""

    start = 0

    def __init__(self, data):
        super().__init__(data)
        self._random = random.Random(self.start)

    def draw_integer(self, min_value=None, max_value=None, *, weights=None, shrink_towards=0):
        return self._random.randint(min_value, max_value)

    def draw_boolean(self, p=0.5):
        return self._random.random() < p

    def _not_drawn(self, *_, **__):
        raise NotImplementedError("programs are made of integers")

    draw_float = draw_string = draw_bytes = _not_drawn


def _chunk(result: Result, number: int, count: int, device: str, codegen_every: int, until: float) -> Wrong | None:
    """Checks ``count`` programs of one seed, or fewer if time runs out; returns the smallest failure."""
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
        if program not in failures:  # Hypothesis runs the smallest one again at the end
            codegen = bool(codegen_every) and result.programs % codegen_every == codegen_every - 1
            drawn += not failures
            tried += bool(failures)
            if tried > SHRINKING or (time.monotonic() > until and not failures):
                return
            if (drawn + tried) % 50 == 0:
                gc.collect()
            verdict = check(program, device, codegen)
            if not failures:
                result.add(verdict, codegen)
            if not verdict.wrong:
                return
            failures[program] = Wrong(program, verdict, codegen)
        raise failures[program]

    try:
        run()
    except Wrong as failure:
        return failure
    return None
