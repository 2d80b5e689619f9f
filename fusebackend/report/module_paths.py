"""Many module paths in few words: the sites of twelve equal layers are one row of a table."""

from __future__ import annotations

import collections
from collections.abc import Iterable

_SHOWN = 2


def condensed(paths: Iterable[str]) -> str:
    """``layers.0-11.mixer`` for the paths of twelve layers; others one after the other, the first few. Empty paths are left out."""
    groups: dict[tuple[str, ...], set[int]] = collections.defaultdict(set)
    for path in dict.fromkeys(p for p in paths if p):
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if _is_index(part)), None)
        groups[tuple(parts) if at is None else (*parts[:at], "\0", *parts[at + 1 :])].update(() if at is None else (int(parts[at]),))
    made = [".".join(_ranges(numbers) if part == "\0" else part for part in parts) for parts, numbers in groups.items()]
    return ", ".join(made[:_SHOWN]) + (f", {len(made) - _SHOWN} more" if len(made) > _SHOWN else "")


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and str(int(part)) == part


def _ranges(numbers: set[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
