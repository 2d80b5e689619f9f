"""Keeps reports where compiled code is kept, and hands them to the trace of a compile.

Inductor's caches skip the passes on a hit. So the report of a compile is kept beside its code, under a key of its own
(:func:`fusebackend.cache_keys.report`), and a warm process finds it there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import trace_structured

from fusebackend.log import log
from fusebackend.native import cache
from fusebackend.report.model import Report


def path(key: str) -> Path:
    """The file of a report: in Inductor's own cache directory, so that it is deleted together with the code that it is about."""
    return Path(cache_dir()) / "fusebackend-reports" / f"{key}.json"


def save(report: Report, key: str) -> None:
    """Keeps a report for later processes. Where the cache can't be written, nothing is kept."""
    try:
        path(key).parent.mkdir(parents=True, exist_ok=True)
        cache.write_atomically(path(key), json.dumps(report.to_dict()).encode())
    except OSError as error:
        log.debug("report not kept: %s", error)


def load(key: str) -> Report | None:
    """The report of an earlier compile with the same key, or None."""
    try:
        return dataclasses.replace(Report.from_dict(json.loads(path(key).read_bytes())), from_cache=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("kept report not readable: %s", error)
        return None


def trace(report: Report) -> None:
    """Adds a report to the artifacts of the compile that is going on (``TORCH_TRACE=folder``), which tlparse shows."""
    payloads: dict[str, Callable[[], str]] = {"json": lambda: json.dumps(report.to_dict()), "string": lambda: str(report)}
    for encoding, payload in payloads.items():
        name = "fusebackend_report" + ("_text" if encoding == "string" else "")
        trace_structured("artifact", metadata_fn=functools.partial(dict, name=name, encoding=encoding), payload_fn=payload)
