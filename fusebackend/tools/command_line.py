"""What all commands share: arguments that are checked when they are parsed, one line for an error, and exit statuses.

==== =====================================================================
 0    all is well
 1    something is wrong: a check failed, or the command could not do it
 2    an argument can't be used; nothing was done
130   stopped by Ctrl-C
==== =====================================================================
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fusebackend.native.cache import CacheError
from fusebackend.native.ninja_build import BuildError
from fusebackend.native.trust import UntrustedError
from fusebackend.tools.object_reference import CommandError, UsageError


def exit_status(command: Callable[[], int]) -> int:
    """Runs ``command``, and returns its exit status. An error whose message says all is one line on stderr; others keep their traceback."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except UsageError as error:
        _say(error)
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # `| head` has read enough; what is still buffered must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BuildError, CacheError, UntrustedError, CommandError, OSError) as error:
        _say(error)
        return 1


def _say(what: object) -> None:
    print(f"fusebackend: {what}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument (\S+): takes", r"\1 takes", message)
        raise UsageError(f"{said} ({self.prog} --help says what is accepted)")


def whole(at_least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``at_least`` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise argparse.ArgumentTypeError(f"takes a whole number from {at_least} on, got {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    """The type of an argument that is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"takes a number above 0, got {text!r}")
    return value


def check_folder_to_write(path: Path, argument: str) -> None:
    """Refuses a folder that can't be made, or written.

    Raises:
        UsageError: naming ``argument``.
    """
    try:
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists() or p.is_symlink())
        if not there.is_dir():
            raise UsageError(f"{argument} takes a folder, got {str(path)!r}: {there} is a file")
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UsageError(f"{argument} takes a folder that can be written, got {str(path)!r}: {error.strerror}") from error


def check_file_to_write(path: Path, argument: str) -> None:
    """Refuses a file that can't be written, or whose folder is not there.

    Raises:
        UsageError: naming ``argument``.
    """
    if path.is_dir():
        raise UsageError(f"{argument} takes a file, got the folder {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{argument} takes a file, got {str(path)!r}: there is no folder {path.absolute().parent}")
    check_folder_to_write(path.absolute().parent, argument)
