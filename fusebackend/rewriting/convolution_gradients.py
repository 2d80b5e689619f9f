"""Which nodes take the gradients that a convolution's backward gives."""

from __future__ import annotations

import operator

from torch import fx

from fusebackend import fx_utils as g
from fusebackend.rewriting.pattern import Reject


def read_gradients(node: fx.Node) -> list[fx.Node | None] | Reject:
    """The nodes of the gradients of x, weight and bias at ``node``, a ``convolution_backward``; None for each that is not used."""
    found: list[fx.Node | None] = [None, None, None]
    for user in node.users:
        if user.target is not operator.getitem or found[user.args[1]] is not None:  # type: ignore[index]
            return Reject(f"{g.describe(user)} uses the gradients in a way that is not supported", user)
        found[user.args[1]] = user  # type: ignore[index]
    return found
