"""``python -m fusebackend patterns``: what is looked for."""

from __future__ import annotations

import sys

from fusebackend.rewriting.registry import all_patterns


def print_patterns() -> int:
    """Prints each pattern's level, its anchors, and the first line of the module that defines it."""
    for pattern in all_patterns():
        anchors = ", ".join(map(str, pattern.anchors))
        summary = (sys.modules[type(pattern).__module__].__doc__ or "").strip().split("\n")[0]
        print(f"{pattern.name} ({pattern.level}, at {anchors})\n    {summary}")
    return 0
