"""Finds the substitution that makes a user's check fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from fusebackend.rewriting.fuel import Fuel, forced_fuel
from fusebackend.rewriting.outcome import Substitution
from fusebackend.tools.object_reference import resolve


@dataclasses.dataclass(frozen=True)
class Bisection:
    """The result of :func:`bisect`.

    Attributes:
        total: the number of substitutions in a compile without a limit.
        culprit: the first substitution with which the check fails; None if it passes with all, or fails without any.
        passes_without: whether the check passes without any substitution.
    """

    total: int
    culprit: Substitution | None
    passes_without: bool

    def __str__(self) -> str:
        if not self.passes_without:
            return f"the check fails without any substitution too ({self.total} with all): the cause lies elsewhere"
        if self.culprit is None:
            return f"the check passes with all {self.total} substitutions"
        c = self.culprit
        shapes = f"{', '.join(c.inputs)} -> {', '.join(c.outputs)}"
        return f"the check fails from this substitution on: {c.pattern} in {c.graph}, {c.source}\n  {shapes}"


def bisect(check: Callable[[], object], progress: Callable[[str], None] = lambda line: None) -> Bisection:
    """Runs ``check`` with different numbers of substitutions and finds the first one that makes it fail, by binary search.

    Args:
        check: compiles with ``backend="fuse"`` and runs; returns False or raises if the result is wrong. It must do the same at
            every call. It is called about log2(number of substitutions) + 2 times, and compiles each time.
        progress: receives one line a step.
    """

    def passes(limit: int | None) -> tuple[bool, Fuel]:
        torch._dynamo.reset()
        with forced_fuel(Fuel(limit)) as fuel:
            try:
                ok = check() is not False
            except Exception as error:
                progress(f"  ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
                ok = False
        progress(f"{'all' if limit is None else limit} substitutions: {'passes' if ok else 'fails'}")
        return ok, fuel

    ok, everything = passes(None)
    total = len(everything.applied)
    if ok:
        return Bisection(total, None, True)
    if not passes(0)[0]:
        return Bisection(total, None, False)
    good, bad, last = 0, total, everything
    while bad - good > 1:
        middle = (good + bad) // 2
        ok, fuel = passes(middle)
        if ok:
            good = middle
        else:
            bad, last = middle, fuel
    return Bisection(total, last.applied[bad - 1], True)


def print_bisection(name: str) -> int:
    """``python -m fusebackend bisect``. Returns 0 if the check passes with all substitutions.

    Args:
        name: ``package.module:function``, the check.

    Raises:
        UsageError: there is no such function.
    """
    found = bisect(resolve(name, "bisect"), print)
    print(found)
    return 0 if found.passes_without and found.culprit is None else 1
