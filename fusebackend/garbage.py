"""Pauses Python's cyclic garbage collector.

A compile makes millions of objects that stay, and the collector looks at all of the process's again and again: on large models that is a
tenth of a compile. While graphs are rewritten nothing is worth that; where tensors are made, for timing, cycles might hold their memory.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()  # backward graphs are compiled in a thread of their own
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """A block, in any threads at once, without garbage collection. Afterwards it is on if it was."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


@contextlib.contextmanager
def collection_resumed() -> Iterator[None]:
    """Within :func:`collection_paused`, a block in which garbage is collected as before it."""
    with _lock:
        if _pauses and _was_enabled:
            gc.enable()
    try:
        yield
    finally:
        with _lock:
            if _pauses:
                gc.disable()
