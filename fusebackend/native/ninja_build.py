"""Writes the ninja file of a library and runs ninja on it."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fusebackend.native.toolchain import Toolchain

_UNWRAPPED = 10**9  # columns: a wrapped line would lose spaces inside quotes


class BuildError(RuntimeError):
    """The library can't be built; the message says what is missing or ends with the compiler's output."""


class CompilerError(BuildError):
    """A compiler or linker ran and failed: the next attempt would take the same time to fail."""


def check_nvcc_arguments(*words: str) -> None:
    """Refuses what nvcc would hand on to a shell: it puts paths between double quotes in commands of its own, and runs these by a shell.

    Raises:
        BuildError: a word, or the folder for temporary files, holds a character that means something between double quotes.
    """
    for word in (*words, tempfile.gettempdir()):
        if set(word) & set('"$`\\'):
            raise BuildError(f'nvcc would run a part of this path as a command: {word!r}; use folders and files without " $ ` and \\')


def ninja_file(
    toolchain: Toolchain,
    objects: Sequence[tuple[str, Path, list[str]]],
    library: str,
    link_arguments: list[str],
    empty_libraries: Sequence[str] = (),
) -> str:
    """The text of a ninja file that compiles each (object, source, compiler arguments), makes the empty libraries that
    ``link_arguments`` ask for, and links them into ``library``."""
    try:
        from ninja import ninja_syntax
    except ImportError as error:
        raise BuildError(f"{error}: pip install ninja") from error

    def escape(text: str) -> str:
        if "\n" in text or "\r" in text:
            raise BuildError(f"ninja takes no path with a line break: {text!r}; rename that folder or file, or use another")
        return ninja_syntax.escape(text)

    def variables(name: str, arguments: list[str]) -> dict[str, str]:
        return {"name": escape(name), "arguments": escape(shlex.join(arguments))}

    text = io.StringIO()
    writer = ninja_syntax.Writer(text, width=_UNWRAPPED)  # type: ignore[arg-type]  # it takes any stream
    writer.variable("ninja_required_version", "1.5")
    for rule, compiler, dependencies in (("cxx", toolchain.cxx, "-MMD"), ("nvcc", toolchain.nvcc, "-MD")):
        if compiler:
            command = f"{escape(compiler)} {dependencies} -MF $out.d $arguments -c $in -o $out"
            writer.rule(rule, command, description="$name", depfile="$out.d", deps="gcc")
    writer.rule("link", f"{escape(toolchain.cxx or '')} $in -o $out $arguments", description="$name")
    for output in empty_libraries:
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{Path(output).name}", "-x", "c++", os.devnull]
        writer.build([output], "link", variables=variables(output, options))
    for i, (output, source, arguments) in enumerate(objects):
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        if rule == "nvcc":
            check_nvcc_arguments(str(source), *arguments)
        # By a variable: a bar ends a path that stands in the rule itself, and nothing escapes it.
        writer.variable(f"source{i}", escape(str(source)))
        writer.build([output], rule, [f"$source{i}"], variables=variables(source.name, arguments))
    compiled = [output for output, _, _ in objects]
    writer.build([library], "link", compiled, list(empty_libraries), variables=variables(library, link_arguments))
    writer.default(library)
    return text.getvalue()


def run_ninja(folder: Path, lock: int, progress: Callable[[str], None] | None) -> None:
    """Runs ninja in ``folder``. It inherits the file descriptor ``lock``.

    Raises:
        BuildError: there is no ninja.
        CompilerError: a command failed.
    """
    began = time.perf_counter()
    found = shutil.which("ninja")
    command = [*([found] if found else [sys.executable, "-m", "ninja"]), "-C", str(folder)]
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
            pass_fds=(lock,),  # if this process is killed, ninja goes on, and the next builder must wait for it
            start_new_session=True,  # see _end
        )
    except OSError as error:
        raise BuildError(f"ninja can't be run ({error}): pip install ninja") from error
    output: list[str] = []
    try:
        for line in process.stdout or ():
            output.append(line)
            if progress and line.startswith("["):
                progress(f"{line.rstrip()} ({time.perf_counter() - began:.0f} s)")
        status = process.wait()
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    if status != 0:
        raise CompilerError(f"compiling the kernels failed ({shlex.join(command)}):\n{''.join(output[-40:])}")


def _end(process: subprocess.Popen) -> None:
    """Ends ninja, and the script that started it where ``ninja`` is one: they have a process group of their own. Told to stop, ninja ends
    its compilers and removes what they have half written."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
