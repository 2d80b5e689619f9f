"""Loads a shared library that is open already."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from pathlib import Path

import torch

_lock = threading.Lock()
_last_descriptor = 2  # the standard streams have the first numbers


def load(descriptor: int, path: Path) -> ctypes.CDLL:
    """Loads the library that ``descriptor`` is open on, which was opened as ``path``.

    It is loaded by its name in ``/proc/self/fd``, so that nothing can take its place between the check of its contents and the load. The
    name is never used again: the dynamic loader takes a second library of a name for the first. So the descriptor is duplicated to a
    number above all that were used, and stays open.

    Raises:
        OSError: it can't be loaded.
    """
    global _last_descriptor
    with _lock:
        kept = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _last_descriptor + 1)
        _last_descriptor = kept
    name = f"/proc/self/fd/{kept}"
    if not os.path.exists(name):  # no /proc: nobody else can write in the folders on the way to `path`, so it is still the same file
        name = str(path)
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        os.close(kept)
        raise OSError(f"{path} can't be loaded: {str(error).replace(name, path.name)}") from error
    torch.ops.loaded_libraries.add(str(path))
    return library
