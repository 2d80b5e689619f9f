"""A line of progress on stderr, for steps that take seconds: building, compiling, timing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_line(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows ``title`` and a text: rewritten in place on a terminal, otherwise the first and the last only.

    Nothing is shown if the function is never called.
    """
    stream, live, shown = sys.stderr, sys.stderr.isatty(), ""

    def show(text: str) -> None:
        nonlocal shown
        line = f"fusebackend: {title} {text}"
        if live:
            stream.write(f"\r\x1b[2K{line}")
        elif not shown:
            stream.write(f"fusebackend: {title} ...\n")
        shown = line
        stream.flush()

    try:
        yield show
    finally:
        if shown:
            stream.write("\n" if live else f"{shown}\n")
            stream.flush()
