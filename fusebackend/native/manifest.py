"""A built library's folder: the library, and a manifest of what it was built from and for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fusebackend.native import cache

LIBRARY = "libfusebackend.so"
MANIFEST = "libfusebackend.json"


def write(folder: Path, library: bytes, contents: dict[str, object], private: bool) -> None:
    """Puts a library and its manifest into ``folder``; ``private`` ones can be read by this user only."""
    folder.mkdir(parents=True, exist_ok=True)
    cache.write_atomically(folder / LIBRARY, library, mode=0o700 if private else 0o755)
    # Last: a library without a manifest is an unfinished build, which `read` refuses.
    text = json.dumps({**contents, "sha256": hashlib.sha256(library).hexdigest()}, indent=1)
    cache.write_atomically(folder / MANIFEST, text.encode(), mode=0o600 if private else 0o644)


def read(folder: Path) -> dict | None:
    """The manifest of the library in ``folder``; None if there is none, or if the library is not the one that was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        library = (folder / LIBRARY).read_bytes()
        texts = [manifest[k] for k in ("key", "content", "march")] + list(manifest["architectures"])
        intact = all(isinstance(t, str) for t in texts) and manifest.get("sha256") in (None, hashlib.sha256(library).hexdigest())
        return manifest if intact else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
