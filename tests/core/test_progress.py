"""Lines of progress: one on a terminal, none in a program's logs."""

import io
import os
import sys

import pytest

from fusebackend.progress import progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, monkeypatch, texts=("one", "two"), **kwargs):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    with progress_line("building", **kwargs) as show:
        for text in texts:
            show(text)
    return stream.getvalue()


def test_a_terminal_has_one_line(monkeypatch):
    written = shown(Terminal(), monkeypatch)
    assert written == "\r\x1b[2Kfusebackend: building one\r\x1b[2Kfusebackend: building two\n"
    assert all(len(line.rstrip()) < 40 for line in shown(Terminal(), monkeypatch, ["x" * 100]).split("\x1b[2K")), "it would be wrapped"


def test_what_is_no_terminal_has_none_but_from_our_commands(monkeypatch):
    assert shown(io.StringIO(), monkeypatch) == ""
    assert shown(io.StringIO(), monkeypatch, in_logs=True) == "fusebackend: building ...\nfusebackend: building two\n"
    assert shown(io.StringIO(), monkeypatch, [], in_logs=True) == shown(Terminal(), monkeypatch, []) == ""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_real_terminal_is_noticed(monkeypatch):
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress_line("building") as show:
            show("one")
    assert b"fusebackend: building one" in os.read(master, 1000)
    os.close(master)
