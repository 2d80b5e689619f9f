"""Keeps reports where compiled code is kept, and hands them to the trace of a compile.

Inductor's caches skip the passes on a hit. So the report of a compile is kept beside its code, under a key of its own
(:func:`fusebackend.cache_keys.report`), and a warm process finds it there. The part of each graph is kept once more under Inductor's
key of its code (:func:`fusebackend.cache_keys.graph`), which other programs may share.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import trace_structured

from fusebackend.native import kept_files
from fusebackend.report.model import Report


def path(key: str) -> Path:
    """The file of a report: in Inductor's own cache directory, so that it is deleted together with the code that it is about."""
    return Path(cache_dir()) / "fusebackend-reports" / f"{key}.json"


def save(report: Report, key: str) -> None:
    """Keeps a report for later processes. Where the cache can't be written, nothing is kept."""
    kept_files.write(path(key), report.to_dict())


def load(key: str) -> Report | None:
    """The report of an earlier compile with the same key, or None."""
    found = kept_files.read(path(key), Report.from_dict)
    return None if found is None else dataclasses.replace(found, from_cache=True)


def trace(report: Report) -> None:
    """Adds a report to the artifacts of the compile that is going on (``TORCH_TRACE=folder``), which tlparse shows."""
    payloads: dict[str, Callable[[], str]] = {"json": lambda: json.dumps(report.to_dict()), "string": lambda: str(report)}
    for encoding, payload in payloads.items():
        name = "fusebackend_report" + ("_text" if encoding == "string" else "")
        trace_structured("artifact", metadata_fn=functools.partial(dict, name=name, encoding=encoding), payload_fn=payload)
