"""The package's logger, and warnings that are given once a process."""

from __future__ import annotations

import logging


def _say_who_speaks(record: logging.LogRecord) -> bool:
    """A filter: without a handler, Python prints a warning's text alone, and torch's handler prints no logger's name."""
    if record.levelno >= logging.WARNING and not str(record.msg).startswith("fusebackend: "):
        record.msg = f"fusebackend: {record.msg}"
    return True


log = logging.getLogger("fusebackend")
log.addFilter(_say_who_speaks)

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Logs ``message`` as a warning the first time that it is given."""
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)
