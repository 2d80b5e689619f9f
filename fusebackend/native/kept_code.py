"""What the native library compiles at run time, kept in the cache directory for the next process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from fusebackend import cache_keys
from fusebackend.log import log
from fusebackend.native import cache


def keep(library: ctypes.CDLL, key: str) -> None:
    """From now on, where the cache directory can be used.

    Args:
        key: the library's.
    """
    try:
        keep_in(library, cache.directory("code", cache_keys.run_time_code(key)))
    except Exception as error:  # what can't be kept is compiled again
        log.debug("what is compiled at run time is not kept: %s", error)


def keep_in(library: ctypes.CDLL, folder: Path | None) -> None:
    """In that folder, which nobody else may be able to write; None keeps nothing, and finds nothing."""
    library.fusebackend_keep_code_in.restype = None
    library.fusebackend_keep_code_in(ctypes.c_char_p(b"" if folder is None else os.fsencode(folder.absolute())))
