"""``assert_pattern``, for the tests of those who write patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusebackend import backend
from fusebackend.cotangent import cotangent
from fusebackend.report.model import Report


class PatternAssertion(AssertionError):
    """Raised by :func:`assert_pattern`; the message holds the report."""


def assert_pattern(
    fn: Callable,
    *args: Any,
    pattern: str,
    count: int | None = None,
    rejected: str | None = None,
    training: bool = False,
    dynamic: bool | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Compiles ``fn(*args)`` with ``backend="fuse"`` and only ``pattern``, and asserts what was substituted, and that
    the result and what is left in the arguments are eager's.

    The graph is rewritten as in a real compile but run without code generation, so a test takes a fraction of a second.
    The gate is off: a match is applied whether it pays or not.

    Args:
        fn: function or module.
        args: its arguments.
        pattern: the name of the pattern.
        count: how many substitutions there must be; by default at least one, or none if ``rejected`` is given.
        rejected: there must be a near miss whose reason contains these words.
        training: also compare the gradients of ``args`` that require grad and, of a module, of its parameters.
        dynamic: as for torch.compile.
        rtol, atol: as for torch.testing.assert_close, against eager.

    Returns:
        The report.

    Raises:
        PatternAssertion: something else was found, or the result differs.
    """
    torch._dynamo.reset()
    options: dict[str, Any] = {"fuse.patterns": [pattern], "fuse.interpret": True, "fuse.gate": "off"}
    with torch.random.fork_rng():
        expected, expected_args = _run(fn, args, training)
    with torch.random.fork_rng():
        got, got_args = _run(torch.compile(fn, backend=backend.fuse, options=options, dynamic=dynamic), args, training)
    report = Report()
    for part in backend.reports():
        report.extend(part)
    found = len([s for s in report.substitutions if s.pattern == pattern])
    if count is None:
        wrong = found if rejected else not found
        wanted = "none" if rejected else "at least one"
    else:
        wrong, wanted = found != count, str(count)
    if wrong:
        raise PatternAssertion(f"expected {wanted} substitution(s) by {pattern!r}, found {found}\n{report}")
    if rejected and not any(rejected in r.reason for r in report.rejections if r.pattern == pattern):
        raise PatternAssertion(f"expected a near miss of {pattern!r} because of {rejected!r}\n{report}")
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise PatternAssertion(f"with {pattern!r} the result differs from eager: {error}\n{report}") from error
    try:
        torch.testing.assert_close(got_args, expected_args, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise PatternAssertion(f"with {pattern!r} the call leaves other values in its arguments than eager: {error}\n{report}") from error
    return report


def _run(fn: Callable, args: tuple, training: bool) -> tuple[Any, list[torch.Tensor]]:
    """What the call gives, and its tensor arguments as it leaves them."""
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) and a.is_leaf else a for a in args]
    tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
    outputs = fn(*leaves)
    if not training:
        return outputs, tensors
    flat = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
    inputs = [a for a in tensors if a.requires_grad]
    if isinstance(fn, torch.nn.Module):  # compiled or not
        inputs += [p for p in fn.parameters() if p.requires_grad]
    if not flat or not inputs:
        raise ValueError(
            "assert_pattern: training=True compares gradients: an argument or a parameter must require grad, and reach the result"
        )
    return (outputs, torch.autograd.grad(flat, inputs, list(map(cotangent, flat)))), tensors
