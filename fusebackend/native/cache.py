"""The private per-user directory in which built libraries, code that they compiled, timings, answers and reports are kept.

Nothing is loaded from it that another user could have written (:mod:`fusebackend.native.trust`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fusebackend.native import trust


class CacheError(RuntimeError):
    """The cache directory can't be used safely; the message says why and what to do."""


def directory(*parts: str) -> Path:
    """``$FUSEBACKEND_CACHE_DIR`` or ``~/.cache/fusebackend``, with ``parts`` below it; what is missing is made with mode 0700.

    Raises:
        CacheError: it can't be made, or somebody else could write it, or put another in its place.
    """
    try:
        root = Path(os.environ.get("FUSEBACKEND_CACHE_DIR") or _cache_home() / "fusebackend")
    except RuntimeError as error:
        raise CacheError(f"no cache directory ({error}): set FUSEBACKEND_CACHE_DIR to a directory of yours") from error
    path = root.joinpath(*parts)
    try:
        make_private(path)
        trust.check_folder(path)
        return path
    except (OSError, trust.UntrustedError) as error:
        raise CacheError(f"cache directory {root}: {error}; or set FUSEBACKEND_CACHE_DIR to a directory of yours") from error


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def make_private(path: Path) -> None:
    """Makes a folder and those that are missing above it, each of them private whatever the umask: ``Path.mkdir`` has that for the last
    one only."""
    if not path.is_dir():
        make_private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


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
