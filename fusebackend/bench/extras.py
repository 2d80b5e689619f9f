"""Imports of packages that are not always installed."""

from __future__ import annotations

import importlib
from typing import Any

from fusebackend.tools.object_reference import CommandError


class MissingExtra(CommandError):
    """A package of an extra can't be imported. The message says how to install it."""


def optional(module: str, purpose: str, extra: str = "bench") -> Any:
    """The module of that name, imported.

    Args:
        module: e.g. ``"scipy.stats"``.
        purpose: what needs it, for the message.
        extra: which extra of this package brings it.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(f"{purpose} needs {package}, which can't be imported ({error}): pip install 'fusebackend[{extra}]'") from error
