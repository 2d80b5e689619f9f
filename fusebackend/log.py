"""The package's logger, and warnings that are given once a process."""

from __future__ import annotations

import logging

log = logging.getLogger("fusebackend")

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Logs ``message`` as a warning the first time that it is given."""
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
