"""A line of progress on stderr, for steps that take seconds: building, compiling, timing."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_line(title: str, in_logs: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows ``title`` and a text in one line of the terminal, rewritten in place.

    Nothing is shown if the function is never called, nor where the output is no terminal: that belongs to the user's program.

    Args:
        in_logs: for commands of ours: where the output is no terminal, the first text and the last one are shown, in a line each.
    """
    stream, live, shown = sys.stderr, sys.stderr.isatty(), ""

    def show(text: str) -> None:
        nonlocal shown
        line = f"fusebackend: {title} {text}"
        if live:
            # A line that the terminal had to wrap could not be rewritten.
            stream.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
        elif in_logs and not shown:
            stream.write(f"fusebackend: {title} ...\n")
        shown = line
        stream.flush()

    try:
        yield show
    finally:
        if shown and (live or in_logs):
            stream.write("\n" if live else f"{shown}\n")
            stream.flush()
