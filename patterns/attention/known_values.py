"""Values of nodes that depend on no input: they are computed while compiling."""

from __future__ import annotations

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.numbers import uniform

aten = torch.ops.aten

#: The largest tensor, in bytes, and the most nodes, that are computed.
_MOST_BYTES, _MOST_NODES = 2**26, 200


class Computer:
    """Computes nodes that depend on no input."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, torch.Tensor] = {}

    def value(self, last: fx.Node) -> torch.Tensor | None:
        order, stack = list[fx.Node](), [last]
        while stack:
            node = stack.pop()
            number = uniform(node) if node.target is aten.lift_fresh_copy.default else None  # a tensor that the program made of a number
            if number is not None:
                self.values[node] = torch.full((), number, dtype=g.value(node).dtype).expand(g.value(node).shape)
                continue
            if not _is_computable(node) or len(order) > _MOST_NODES:
                return None
            order.append(node)
            stack += node.all_input_nodes
        for node in sorted(set(order)):
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._argument)
            try:
                self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception:
                return None
        return self.values[last]

    def _argument(self, given: object) -> object:
        """On the CPU, wherever the program has it."""
        if isinstance(given, torch.device):
            return torch.device("cpu")
        return self.values[given] if isinstance(given, fx.Node) else given


def _is_computable(node: fx.Node) -> bool:
    """Whether ``node`` is a small tensor of known sizes that an operator without effects and without chance computes."""
    if not g.may_be_called_early(node):
        return False
    value, symbolic = g.value(node), list[object]()
    fx.node.map_aggregate((node.args, node.kwargs), lambda a: symbolic.append(a) if isinstance(a, torch.SymInt) else None)
    sizes = [s for s in (*value.shape, *value.stride()) if not isinstance(s, int)]
    return not sizes and not symbolic and value.numel() * value.itemsize <= _MOST_BYTES
