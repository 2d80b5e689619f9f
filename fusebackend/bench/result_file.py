"""The JSON file of a run: ``{"environment": ..., section: [row, ...], "seconds": ...}``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusebackend.bench.rows import SECTIONS
from fusebackend.native.cache import write_atomically
from fusebackend.tools.object_reference import UsageError


def write(path: Path, run: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(run, indent=1).encode())
    path.chmod(0o644)  # files of the cache are private, this one is not


def read(path: Path) -> dict[str, Any]:
    """The run that :func:`write` wrote.

    Raises:
        UsageError: there is no such file, or it holds something else.
    """
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(run, dict) or "environment" not in run or not set(SECTIONS) & set(run):
        raise UsageError(f"{path}: no result of `python -m fusebackend bench`: it has no environment, or none of {', '.join(SECTIONS)}")
    return run


def merged(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one.

    Raises:
        UsageError: they were made on different devices, torch versions or commits.
    """
    whole: dict[str, Any] = {}
    for run in runs:
        for section, content in run.items():
            if section in SECTIONS:
                whole[section] = whole.get(section, []) + content
        environment = whole.setdefault("environment", run["environment"])
        for key in ("device", "torch", "commit"):
            if environment.get(key) != run["environment"].get(key):
                raise UsageError(f"these files are of more than one {key}: {environment.get(key)} and {run['environment'].get(key)}")
    return whole
