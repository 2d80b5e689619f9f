"""``python -m fusebackend patterns``: what is looked for."""

from __future__ import annotations

import sys

from fusebackend.rewriting import registry
from fusebackend.rewriting.pattern import Pattern


def print_patterns() -> int:
    """Prints each pattern's level, its anchors, the package that it comes from, and what it says about itself; then the packages whose
    patterns could not be loaded. Returns 0 if there are none of these."""
    for pattern in registry.all_patterns():
        anchors = ", ".join(map(str, pattern.anchors))
        origin = registry.origin(pattern.name) or "registered by the program"
        print(f"{pattern.name} ({pattern.level}, at {anchors}), {origin}\n    {_summary(pattern)}")
    failed = registry.failed_packages()
    for package, reason in failed.items():
        print(f"fusebackend: {package} could not be loaded: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _summary(pattern: Pattern) -> str:
    """The first line of the search function's docstring, or of the module that defines the pattern."""
    about = getattr(pattern, "search_fn", None) or sys.modules[type(pattern).__module__]
    return (about.__doc__ or f"{getattr(about, '__module__', '')}.{about.__name__}").strip().split("\n")[0]
