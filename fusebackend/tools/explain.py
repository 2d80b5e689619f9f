"""``explain``: what the backend would rewrite in a model, what it would not, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

from fusebackend import backend
from fusebackend.report.history import collecting
from fusebackend.report.model import Report
from fusebackend.tools.factory import UsageError, made_by


def explain(fn_or_module: Callable, *args: Any, **kwargs: Any) -> Report:
    """Compiles and runs ``fn_or_module(*args, **kwargs)`` once with ``backend="fuse"`` and reports every substitution
    and every near miss, over all its graphs, backward ones included where an input or parameter requires grad.

    The graphs are rewritten as in a real compile but run without code generation, so this takes seconds, not minutes.
    To explain with options, modes or ``dynamic=True``, give what ``torch.compile(..., backend="fuse", ...)`` returned.

    The model really runs once: in-place effects on its inputs happen; its buffers and the random state are restored.
    Like ``torch._dynamo.explain`` it resets Dynamo before and after, so compiled functions compile again when next
    called (Inductor's caches make that short).

    Returns:
        Report: print it, or read ``.substitutions``, ``.rejections`` and ``.graphs``.

    Raises:
        TypeError: ``fn_or_module`` is not callable.
    """
    if not callable(fn_or_module):
        raise TypeError(f"explain: fn_or_module must be callable, got {type(fn_or_module).__name__}")
    compiled = fn_or_module if _is_compiled(fn_or_module) else torch.compile(fn_or_module, backend=backend.fuse)
    module = getattr(fn_or_module, "_orig_mod", fn_or_module)
    buffers = list(module.buffers()) if isinstance(module, torch.nn.Module) else []
    kept = [(b, b.detach().clone()) for b in buffers]
    torch._dynamo.reset()
    try:
        with (
            collecting() as found,
            # The check of custom operators at the first call can't take tensor subclasses, and here every operator is called.
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
        whole.notes.append("nothing was compiled: Dynamo found no tensor operations, or was told to skip this function")
    return whole


def _is_compiled(fn: Callable) -> bool:
    return isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) or hasattr(fn, "_torchdynamo_orig_callable")


def print_explanation(factory: str, page: Path | None, dynamic: bool) -> int:
    """``python -m fusebackend explain``.

    Args:
        factory: ``package.module:function``, which makes the model and its inputs.
        page: where to write the report as a page too.
        dynamic: whether to compile with ``dynamic=True``.

    Raises:
        UsageError: there is no such factory, or ``page`` does not end in ``.html``.
    """
    if page and page.suffix != ".html":  # said before the work, not after it
        raise UsageError(f"--html writes a page: FILE.html is accepted, got {str(page)!r}")
    fn, args, kwargs = made_by(factory, "explain")
    report = explain(torch.compile(fn, backend="fuse", dynamic=True) if dynamic else fn, *args, **kwargs)
    print(report)
    if page:
        print(f"written: {report.save(page)}")
    return 0
