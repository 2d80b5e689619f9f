"""Functions that ``torch.compile`` can't mistake for one another."""

from __future__ import annotations

import types
from collections.abc import Callable


def with_own_code(fn: Callable, name: str) -> Callable:
    """``fn`` behind a code object of its own. Dynamo's cache is keyed by code objects, and counts their recompilations: nothing
    may be served what was compiled for another, or be left to eager mode because of others."""

    def call(*arguments):
        return fn(*arguments)

    return types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)
