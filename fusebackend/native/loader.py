"""Finds the native library, builds it on first use, and loads it.

A library is looked for in the folder ``$FUSEBACKEND_LIBRARY``, in the package (``fusebackend/lib``, where a wheel may carry it), and in the
cache, where it is built if it is missing. Nothing here raises: without a library the backend is plain Inductor, and every site that
needed a kernel is reported with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import threading
import time
from pathlib import Path

import torch

from fusebackend import cache_keys
from fusebackend.log import log
from fusebackend.native import build, cache, cuda_wheels, dynamic_library, kept_code, manifest, trust
from fusebackend.native.architectures import TUNED_BASELINE, architecture_of, covers, device_architectures, runs_here
from fusebackend.progress import progress_line


@dataclasses.dataclass(frozen=True)
class Native:
    """What was loaded. ``reason`` says why there is no library, or no CUDA code in it; None if nothing is missing. ``march`` is what its
    CPU code was compiled for, and ``library`` has its C functions."""

    path: Path | None = None
    architectures: tuple[str, ...] = ()
    key: str = ""
    reason: str | None = None
    march: str = ""
    library: ctypes.CDLL | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def tuned_for_cpu(self) -> bool:
        """Whether its CPU kernels are those that were measured, and not the portable code beside them."""
        return self.march == TUNED_BASELINE

    def why_not(self, device: torch.device, *ops: torch._ops.OpOverload) -> str | None:
        """None if ``ops`` can be called on ``device``; otherwise the reason, as it goes into the report."""
        if self.path is None:
            return f"no native library: {self.reason}"
        if device.type == "cuda" and not covers(self.architectures, architecture_of(torch.cuda.get_device_capability(device))):
            return self.reason or f"the native library has no code for this GPU (built for {self.architectures})"
        key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
        missing = next((o for o in ops if key and not torch._C._dispatch_has_kernel_for_dispatch_key(o._schema.name, key)), None)
        if key is None or missing is not None:
            return f"{missing or 'the native library'} has no kernel for device type {device.type!r}"
        return None


#: Seconds for which a failed build is not tried again. Not for ever: its cause may have been a full disk.
FAILURES_LAST = 24 * 3600

_loaded: Native | None = None
_lock = threading.Lock()


def load() -> Native:
    """The loaded library; the first call builds it if need be (tens of seconds, with a progress line)."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _find_and_load()
            if _loaded.library is not None:
                kept_code.keep(_loaded.library, _loaded.key)
            if _loaded.reason:
                log.warning("%s; affected sites are left to Inductor (python -m fusebackend env says more)", _loaded.reason)
        return _loaded


def _find_and_load() -> Native:
    try:
        return _prebuilt() or _built()
    except (build.BuildError, cache.CacheError) as error:
        return Native(reason=str(error))
    except Exception as error:  # a full disk, a library that can't be loaded, ...
        return Native(reason=f"{type(error).__name__}: {error}")


def _prebuilt() -> Native | None:
    for folder in prebuilt_folders():
        try:
            with manifest.opened(folder, code=Path(__file__) if folder == PACKAGED else None) as found:
                unfit = _unfit(found.contents)
                if unfit is None:
                    return _load(found)
        except FileNotFoundError as error:
            unfit = f"there is no {error.filename}"
        except (manifest.DamagedError, trust.UntrustedError, OSError) as error:
            unfit = str(error)
        log.warning("the library in %s is not used: %s; `python -m fusebackend build --output FOLDER` builds another", folder, unfit)
    return None


PACKAGED = Path(__file__).parents[1] / "lib"


def prebuilt_folders() -> list[Path]:
    """The folders in which a library that was built ahead is looked for."""
    named = os.environ.get("FUSEBACKEND_LIBRARY")
    return [*([Path(named)] if named else []), *([PACKAGED] if PACKAGED.is_dir() else [])]


def _unfit(found: dict) -> str | None:
    """Why a library that was built ahead can't be used here, by its manifest."""
    if found["content"] != cache_keys.content_hash(build.sources_root()):
        return "it was built from other sources"
    if not runs_here(found["march"]):
        return f"it needs another CPU ({found['march']})"
    missing = [a for a in device_architectures() if not covers(tuple(found["architectures"]), a)]
    return f"it has no code for compute capability {', '.join(missing)}" if missing else None


def _built() -> Native:
    wanted = build.plan()
    gpus = device_architectures()
    reason = None
    if gpus and not wanted.cuda:
        reason = f"no nvcc found, so there are no CUDA kernels: {cuda_wheels.how_to_get_nvcc()}"
    failed = cache.directory("native") / f"{wanted.key}.failed"
    if failed.exists() and 0 <= time.time() - failed.stat().st_mtime < FAILURES_LAST:
        raise build.BuildError(f"an earlier build failed, see {failed}; `python -m fusebackend build` tries again")
    try:
        with progress_line("building kernels, once for this machine") as progress:
            folder = build.build(wanted, progress=progress)
    except build.CompilerError as error:
        # Remembered, so that later processes don't spend the same time on the same failure. What is missing is found missing at once.
        with contextlib.suppress(OSError):
            cache.write_atomically(failed, str(error).encode())
        raise
    try:
        with manifest.opened(folder) as found:
            return dataclasses.replace(_load(found), reason=reason)
    except (FileNotFoundError, manifest.DamagedError, trust.UntrustedError) as error:
        raise build.BuildError(f"the library that was just built can't be read back: {error}") from error


def _load(found: manifest.Opened) -> Native:
    library = dynamic_library.load(found.descriptor, found.path)
    contents = found.contents
    return Native(found.path, tuple(contents["architectures"]), contents["key"], march=contents["march"], library=library)
