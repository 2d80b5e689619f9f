"""``python -m fusebackend fuzz``: random programs against eager."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fusebackend.tools.command_line import check_folder_to_write
from fusebackend.tools.object_reference import CommandError


def fuzz(*, count: int | None, minutes: float | None, device: str, save_to: Path, **settings: Any) -> int:
    """Fuzzes and prints what was found. Returns 1 if a program gave something else than eager.

    Args:
        count, minutes: when to stop; a minute if neither is given.
        settings: further arguments of :func:`fusebackend.fuzz.run.fuzz`.

    Raises:
        UsageError: torch sees no such device, or ``save_to`` can't be written.
        CommandError: hypothesis is not installed.
    """
    check_folder_to_write(save_to, "--output")
    try:
        from fusebackend.fuzz import run
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise CommandError("fuzz needs hypothesis: pip install 'fusebackend[test]'") from error

    if minutes is None and count is None:
        minutes = 1.0
    result = run.fuzz(count=count, minutes=minutes, device=device, save_to=save_to, say=lambda line: print(line, flush=True), **settings)
    print(result.by_kind())
    print(f"torch {torch.__version__}, {device}, seed {settings['start']}: {result}")
    if not result.programs:
        print("fusebackend: no program was compared: give it more --minutes", file=sys.stderr)
    return 1 if result.wrong or not result.programs else 0
