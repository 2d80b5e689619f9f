"""How much time one compile may spend on timing, and the line that shows what is timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

from fusebackend.progress import progress_line

# What may be spent by default: a share of the time since the compile began, which Inductor's code generation, yet to come, at least
# doubles; but no more than these seconds, since a backward may be compiled long after.
_DEFAULT_SHARE, _DEFAULT_SECONDS = 0.1, 10.0
# Of that, what may go into compiling regions, each of which takes seconds: a call takes a twentieth of one, and its site may stand behind.
_COMPILED_SHARE = 0.5
_TOO_LITTLE = "{} both forms takes {:.2g} s, more than is left of what a compile may spend on that by default"

#: What timing does with both forms.
Doing = Literal["calling", "compiling"]

_stood = 0.0  # seconds


def clock() -> float:
    """Seconds, without those in which the clock stood."""
    return time.perf_counter() - _stood


@contextlib.contextmanager
def clock_standing() -> Iterator[None]:
    """The time of the block, in which this process waits for another or for what the program's first step would wait for, costs no
    compile its share of timing."""
    global _stood
    began = time.perf_counter()
    try:
        yield
    finally:
        _stood += time.perf_counter() - began


class Budget:
    """The time that one compile may spend on timing.

    Args:
        seconds: the option ``fuse.gate_seconds``.

    Attributes:
        spent: seconds, but for those that were spent apart.
        spent_apart: on what pays for itself soon.
    """

    def __init__(self, seconds: float):
        self.spent = 0.0
        self.spent_apart = 0.0
        self._seconds = seconds
        self._began = clock()
        self._line = contextlib.ExitStack()
        self._show: Callable[[str], None] | None = None

    def why_spent(self) -> str | None:
        """None while there is time left, then why nothing more is timed."""
        return None if self.spent < self._seconds else f"not timed: the {self._seconds:g} s of fuse.gate_seconds are spent"

    def why_default_spent(self, doing: Doing = "calling", seconds: float = 0.0) -> str | None:
        """None while there is time left for what nobody asked for, then why nothing more is timed.

        Args:
            doing: what is done with both forms: calling them as they are, or compiling them first.
            seconds: that it takes, where they may be many.
        """
        share = min(self._seconds, _DEFAULT_SECONDS, _DEFAULT_SHARE * (clock() - self._began))
        if share <= self.spent:
            return f"the part of a compile that may go into timing by default is spent ({self.spent:.2g} s)"
        if doing == "compiling":
            share *= _COMPILED_SHARE
        return _TOO_LITTLE.format(doing, seconds) if share - self.spent < seconds else None

    def why_spent_apart(self, doing: Doing, seconds: float) -> str | None:
        """The same for what pays for itself soon: it has as many seconds to itself, however short a compile is."""
        return None if self.spent_apart + seconds <= min(self._seconds, _DEFAULT_SECONDS) else _TOO_LITTLE.format(doing, seconds)

    def charge(self, seconds: float, apart: float) -> None:
        """Counts what another rank spent."""
        self.spent += seconds
        self.spent_apart += apart

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of the block."""
        began = clock()
        try:
            yield
        finally:
            self.spent += clock() - began

    @contextlib.contextmanager
    def not_spending(self) -> Iterator[None]:
        """Within :meth:`spending`, the time of the block is not counted."""
        began = clock()
        try:
            yield
        finally:
            self.spent -= clock() - began

    @contextlib.contextmanager
    def spending_apart(self) -> Iterator[None]:
        """Within :meth:`spending`, the time of the block is counted apart."""
        began = clock()
        try:
            with self.not_spending():
                yield
        finally:
            self.spent_apart += clock() - began

    def show(self, subject: str) -> None:
        """Shows what is timed."""
        if self._show is None:
            self._show = self._line.enter_context(progress_line("timing"))
        self._show(f"{subject} ({self.spent:.0f} s of at most {self._seconds:g})")

    def close(self) -> None:
        """Ends the line."""
        self._line.close()
        self._show = None
