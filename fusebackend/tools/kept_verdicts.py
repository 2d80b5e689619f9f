"""``python -m fusebackend gate``: the kept measurements."""

from __future__ import annotations

from fusebackend.profitability import measurement_store


def print_verdicts() -> int:
    """Prints every kept measurement, oldest first."""
    kept = list(measurement_store.stored())
    for _, measurement in kept:
        print(f"{measurement} ({measurement.how}): {measurement.subject} on {measurement.machine}")
    print(f"{len(kept)} verdicts in {measurement_store.folder()}")
    return 0


def clear_verdicts() -> int:
    """Deletes every kept measurement, so that all are taken again."""
    print(f"{measurement_store.clear()} verdicts forgotten")
    return 0
