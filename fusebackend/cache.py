"""The private per-user directory in which built libraries and reports are kept.

Nothing that another user could have written is ever loaded from it: the directory must belong to this user and be
writable by nobody else, or it is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


class CacheError(RuntimeError):
    """The cache directory can't be used safely; the message says why and what to do."""


def directory(*parts: str) -> Path:
    """``$FUSEBACKEND_CACHE_DIR`` or ``~/.cache/fusebackend``, with ``parts`` below it, made with mode 0700.

    Raises:
        CacheError: it can't be made, belongs to another user, or is writable by others.
    """
    root = Path(os.environ.get("FUSEBACKEND_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusebackend")
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(root)
        path = root.joinpath(*parts)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path
    except OSError as error:
        raise CacheError(f"cache directory {root}: {error}; set FUSEBACKEND_CACHE_DIR to a directory of yours") from error


def check_private(path: Path) -> None:
    """Refuses a file or directory that somebody else could have written (CacheError)."""
    info = path.stat()
    if info.st_uid not in (os.getuid(), 0):
        raise CacheError(f"{path} belongs to user id {info.st_uid}, not to you ({os.getuid()}): not used")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"{path} is writable by others (mode {stat.filemode(info.st_mode)}): not used; chmod go-w it")


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Holds an exclusive lock between processes. The kernel releases it when its holder dies, however it dies."""
    with open(directory() / f"{name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` so that a reader sees the old content or the new, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
