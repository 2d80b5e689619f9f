"""A built library's folder: the library, and a manifest of what it was built from and for."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusebackend.log import warn_once
from fusebackend.native import cache, trust

LIBRARY = "libfusebackend.so"
MANIFEST = "libfusebackend.json"

# What is larger is none of ours, and is not read.
_LARGEST_MANIFEST = 1 << 20
_LARGEST_LIBRARY = 1 << 30


class DamagedError(RuntimeError):
    """A library is not the one that was built. The message names the file."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A library whose bytes are those that were built, and which nobody else could have written.

    Attributes:
        path: of the library.
        descriptor: the library, open for reading.
        contents: the manifest: ``key``, ``content``, ``march``, ``architectures`` and others.
    """

    path: Path
    descriptor: int
    contents: dict[str, Any]


def write(folder: Path, library: bytes, contents: dict[str, object], private: bool) -> None:
    """Puts a library and its manifest into ``folder``; ``private`` ones can be read by this user only.

    Whenever the process is killed, the folder holds the library that was there before, or the new one. The new manifest comes first, and
    has the old one in it, which is that of the library until the new library comes.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    for unfinished in (*folder.glob(f".{LIBRARY}.*"), *folder.glob(f".{MANIFEST}.*")):  # of a process that was killed
        unfinished.unlink(missing_ok=True)
    entry: dict[str, object] = {**contents, "sha256": hashlib.sha256(library).hexdigest()}
    with contextlib.suppress(OSError, DamagedError, trust.UntrustedError), trust.opened(folder / MANIFEST) as file:
        previous = _parsed(_read(file, folder / MANIFEST, _LARGEST_MANIFEST), folder / MANIFEST)[0]
        entry["previous"] = {k: v for k, v in previous.items() if k != "previous"}
    cache.write_atomically(folder / MANIFEST, json.dumps(entry, indent=1).encode(), mode=0o600 if private else 0o644)
    cache.write_atomically(folder / LIBRARY, library, mode=0o700 if private else 0o755)


@contextlib.contextmanager
def opened(folder: Path, code: Path | None = None) -> Iterator[Opened]:
    """Opens the library in ``folder`` once, and checks what was opened: who could have written it, and its hash.

    Args:
        code: a file of our own code, for a library that was installed together with it (:func:`fusebackend.native.trust.opened_beside`).

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not the one that was built, or its manifest is damaged.
        trust.UntrustedError: somebody else could have written the library, its manifest, or a folder on the way to them.
    """

    def opened_file(path: Path) -> contextlib.AbstractContextManager[int]:
        return trust.opened_beside(path, code) if code else trust.opened(path)

    # The library first: a manifest that is written between the two has an entry for it, see `write`.
    with opened_file(folder / LIBRARY) as library:
        with opened_file(folder / MANIFEST) as file:
            text = _read(file, folder / MANIFEST, _LARGEST_MANIFEST)
        yield Opened(folder / LIBRARY, library, _entry_of(library, text, folder))


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of the library in ``folder``; None if there is none. What can't be used is ignored with a warning."""
    try:
        with opened(folder) as found:
            return found.contents
    except FileNotFoundError:
        return None
    except (OSError, DamagedError, trust.UntrustedError) as error:
        warn_once(f"{error}; this library is ignored, and built again")
        return None


def _entry_of(library: int, text: bytes, folder: Path) -> dict[str, Any]:
    """The manifest's entry for the library."""
    entries = _parsed(text, folder / MANIFEST)
    if os.fstat(library).st_size > _LARGEST_LIBRARY:
        raise DamagedError(f"{folder / LIBRARY} is damaged: it is larger than {_LARGEST_LIBRARY} bytes")
    digest = _sha256(library)
    entry = next((e for e in entries if e["sha256"] == digest), None)
    if entry is None:
        raise DamagedError(f"{folder / LIBRARY} is damaged: its sha256 is not the one in {MANIFEST}")
    return entry


def _parsed(text: bytes, path: Path) -> list[dict[str, Any]]:
    """A manifest's own entry, and that of the library before it if it has one."""
    try:
        newest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {str(error)[:80]}") from error
    fault = _fault(newest)
    if fault:
        raise DamagedError(f"{path} is damaged: {fault}")
    previous = newest.get("previous")
    return [newest] if _fault(previous) else [newest, previous]


def _fault(entry: Any) -> str | None:
    """What is wrong with an entry; None if it is one."""
    if not isinstance(entry, dict):
        return "it holds no entry"
    wrong = [key for key in ("key", "content", "march", "sha256") if not isinstance(entry.get(key), str)]
    architectures = entry.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        wrong.append("architectures")
    return f"no valid {', '.join(wrong)}" if wrong else None


def _sha256(descriptor: int) -> str:
    digest = hashlib.sha256()
    with open(descriptor, "rb", closefd=False) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _read(descriptor: int, path: Path, most: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise DamagedError(f"{path} is damaged (larger than {most} bytes)")
    return text
