"""The private per-user directory in which built libraries, timings and reports are kept.

Nothing is loaded from it that another user could have written: a directory that belongs to somebody else, or that others can write, is
refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
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


def check_private(path: Path, like: Path | None = None) -> None:
    """Refuses a file or directory that somebody else could have written.

    Args:
        path: what is about to be loaded.
        like: a file that is trusted anyway (our own code, for a library installed beside it): whoever owns that may own
            ``path`` too, and whichever group may write that may write ``path``. World-writable is refused all the same.

    Raises:
        CacheError: ``path`` belongs to another user or is writable by others.
    """
    info = path.stat()
    trusted = like.stat() if like else None
    owners = {os.geteuid(), 0} | ({trusted.st_uid} if trusted else set())
    if info.st_uid not in owners:
        raise CacheError(f"{path} belongs to user id {info.st_uid}, not to you ({os.geteuid()}): not used")
    allowed = trusted.st_mode & stat.S_IWGRP if trusted and trusted.st_gid == info.st_gid else 0
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~allowed:
        raise CacheError(f"{path} is writable by others (mode {stat.filemode(info.st_mode)}): not used; chmod go-w it")


@contextlib.contextmanager
def lock(name: str, progress: Callable[[str], None] | None = None) -> Iterator[int]:
    """Holds an exclusive lock between processes, and yields its file descriptor. A child process that inherits the descriptor holds the
    lock too; the operating system releases it when the last holder has ended. ``progress`` is called if the lock must be waited for."""
    path = directory() / f"{name}.lock"
    try:
        handle = open(path, "w")
    except OSError as error:
        raise CacheError(f"cache directory {path.parent}: {error}; set FUSEBACKEND_CACHE_DIR to a directory of yours") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("waits for another process that is building")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes ``data`` so that a reader sees the old content or the new, never a part, at whichever instruction the writer is killed.

    Nothing waits for the disk: a machine that loses power may keep an empty file or a part, which readers take for none (they check JSON,
    or a hash).
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
