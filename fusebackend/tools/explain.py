"""``explain``: what the backend rewrites in a model, what it does not, and why."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

from fusebackend import backend
from fusebackend.report.comparison import compare
from fusebackend.report.history import collecting
from fusebackend.report.model import Report
from fusebackend.rewriting import inquiry, registry
from fusebackend.tools.command_line import check_file_to_write
from fusebackend.tools.not_here import notes_on_line, notes_on_pattern, parse_line
from fusebackend.tools.object_reference import UsageError, call_factory, users_code


def explain(fn_or_module: Callable, *args: Any, pattern: str | None = None, at: str | None = None, **kwargs: Any) -> Report:
    """Compiles and runs ``fn_or_module(*args, **kwargs)`` once with ``backend="fuse"`` and reports every substitution and near miss.

    The report covers all graphs, including backward graphs where an input or parameter requires grad. The graphs are rewritten as
    in a real compile but run without code generation, so this takes seconds, not minutes. To explain with options, modes or
    ``dynamic=True``, pass the result of ``torch.compile(..., backend="fuse", ...)``.

    The model is run once. Its buffers and the random state are restored; in-place changes of its inputs are not undone. Like
    ``torch._dynamo.explain``, this resets Dynamo before and after: compiled functions compile again when they are next called,
    mostly from Inductor's caches.

    Args:
        pattern: the name of a pattern. The report's notes then say where it came nearest and what differed there, also where that was
            little.
        at: a line of the program, ``"model.py:12"``. The notes then say for each of its operators which patterns look at it, or that none
            does.

    Returns:
        The report. Print it, save it as a page, or read ``.substitutions``, ``.rejections`` and ``.graphs``.

    Raises:
        TypeError: ``fn_or_module`` is not callable.
        ValueError: there is no such pattern, or ``at`` is not of the form.
    """
    if not callable(fn_or_module):
        raise TypeError(f"explain: fn_or_module must be callable, got {type(fn_or_module).__name__}")
    if pattern is not None:
        registry.known(pattern)
    line = parse_line(at) if at is not None else None
    compiled = fn_or_module if _is_compiled(fn_or_module) else torch.compile(fn_or_module, backend=backend.fuse)
    module = getattr(fn_or_module, "_orig_mod", fn_or_module)
    buffers = list(module.buffers()) if isinstance(module, torch.nn.Module) else []
    kept = [(b, b.detach().clone()) for b in buffers]
    torch._dynamo.reset()
    try:
        with (
            collecting() as found,
            inquiry.about(pattern) as nearest,
            # Every operator is called here, and the aliasing check of custom operators fails on tensor subclasses.
            functorch_config.patch(force_non_lazy_backward_lowering=True, check_custom_op_aliasing=False),
            torch.random.fork_rng(),
        ):
            compiled(*args, **kwargs)
    finally:
        torch._dynamo.reset()
        with torch.no_grad():
            for buffer, old in kept:
                buffer.copy_(old)
    whole = Report()
    for part in found:
        whole.extend(part)
    if not found:
        other = ", or it was compiled with another backend" if compiled is fn_or_module else ""
        whole.notes.append(f"nothing was compiled: Dynamo found no tensor operations, or was told to skip this function{other}")
    if pattern is not None:
        whole.notes += notes_on_pattern(whole, registry.get(pattern), nearest)
    if line is not None:
        whole.notes += notes_on_line(whole, line, [registry.get(pattern)] if pattern is not None else registry.all_patterns())
    return whole


def _is_compiled(fn: Callable) -> bool:
    return isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) or hasattr(fn, "_torchdynamo_orig_callable")


def print_explanation(
    factory: str,
    page: Path | None,
    dynamic: bool,
    data: Path | None = None,
    earlier: Path | None = None,
    *,
    pattern: str | None = None,
    at: str | None = None,
) -> int:
    """``python -m fusebackend explain``.

    Args:
        factory: ``package.module:function``, which makes the model and its inputs.
        page: where to write the report as a page too.
        pattern, at: as for :func:`explain`.
        dynamic: whether to compile with ``dynamic=True``.
        data: where to write the report as JSON too.
        earlier: a report that was written so, to compare with.

    Raises:
        UsageError: there is no such factory, ``page`` or ``data`` can't be written or has another suffix, or ``earlier`` is no report.
        UsersCodeError: the factory, or what it made, raises.
    """
    # Said before the work, not after it.
    for path, argument, what, suffix in ((page, "--html", "a page", ".html"), (data, "--json", "JSON", ".json")):
        if path:
            if path.suffix != suffix:
                raise UsageError(f"{argument} writes {what}: FILE{suffix} is accepted, got {str(path)!r}")
            check_file_to_write(path, argument)
    old = _report_in(earlier) if earlier else None
    with _usage():
        parse_line(at) if at is not None else None
    fn, args, kwargs = call_factory(factory, "explain")
    with _usage():  # now: the factory's module may be what registers it
        registry.known(pattern) if pattern is not None else None
    with users_code(f"what {factory}() made"):
        report = explain(torch.compile(fn, backend="fuse", dynamic=True) if dynamic else fn, *args, pattern=pattern, at=at, **kwargs)
    print(report)
    compared = compare(old, report) if old else None
    if compared is not None:
        print(compared)
    if page:
        print(f"written: {report.save(page, compared)}")
    if data:
        print(f"written: {report.save(data)}")
    return 0


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _report_in(path: Path) -> Report:
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--compare takes a report that --json wrote, got {str(path)!r}: {error.strerror}") from error
    except Exception as error:  # whatever another file holds
        raise UsageError(f"--compare takes a report that --json wrote, got {str(path)!r}: {type(error).__name__}: {error}") from error
