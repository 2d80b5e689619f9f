"""In which memory a node may lie in the end: after our passes Inductor computes some operators in place of what they read."""

from __future__ import annotations

import torch
from torch import fx

from fusebackend import fx_utils as g

aten = torch.ops.aten

#: Operators that return their first argument with some elements changed. Inductor, or a pattern of ours, may change these in place.
_OVERWRITE = frozenset(
    {
        aten._unsafe_index_put.default,
        aten._unsafe_masked_index_put_accumulate.default,
        aten.as_strided_scatter.default,
        aten.diagonal_scatter.default,
        aten.index_add.default,
        aten.index_put.default,
        aten.masked_scatter.default,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.select_scatter.default,
        aten.slice_scatter.default,
    }
)


def may_be_in_memory_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory ``node`` may have in the end: itself, what it is a view of, and what these may be computed in place of."""
    found, pending = dict[fx.Node, None](), [node]
    while pending:
        each = pending.pop()
        if each in found:
            continue
        found[each] = None
        owner = g.through_views(each)
        if owner is not each:
            pending.append(owner)
        elif each.target in _OVERWRITE:
            pending.append(each.args[0])  # type: ignore[arg-type]
        elif isinstance(each.target, torch._ops.HigherOrderOperator):  # as a call is written that may change its arguments
            pending += each.kwargs.get("_all_bases", each.all_input_nodes)  # type: ignore[arg-type]
    return list(found)
