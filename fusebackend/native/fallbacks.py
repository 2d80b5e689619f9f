"""Inductor's lowerings of the operators: each is a call of the operator.

Inductor makes such a lowering by itself for what it has none for, unless ``implicit_fallbacks`` is off: then the compile would fail.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._library.utils import get_layout_constraint_tag

from fusebackend.native import ops

#: Namespaces of what comes with PyTorch, beside those of its operators proper.
_OF_PYTORCH = ("inductor", "quantized", "mkldnn", "onednn", "mkl", "rngprims", "torchvision")

#: What substitutions called that is not of this package: kernels of patterns that a program registered.
_emitted: set[torch._ops.OpOverload] = set()


def register(more: Iterable[torch._ops.OpOverload] = ()) -> None:
    """Gives lowerings to the operators that are defined by now, and to ``more``, where they have none.

    To be called when Inductor compiles: importing its lowerings takes a second, which other programs shall not spend.
    """
    from torch._inductor import lowering

    from fusebackend.native import inductor_ir

    more = set(more)
    _emitted.update(more)
    for op in (*ops.defined, *more):
        if op not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            if op.namespace == "fusebackend" and not op._schema.is_mutable:
                inductor_ir.register(op, constraint)
            else:
                lowering.make_fallback(op, layout_constraint=constraint, warn=False)


def custom_operators(graph: fx.Graph) -> set[torch._ops.OpOverload]:
    """The operators in a graph that are not PyTorch's."""
    targets = {n.target for n in graph.nodes if n.op == "call_function"}
    return {t for t in targets if isinstance(t, torch._ops.OpOverload) and not torch._library.utils.is_builtin(t)}


def programs_own(graph: fx.Graph) -> set[torch._ops.OpOverload]:
    """The operators in a graph that come neither with PyTorch nor with a pattern."""
    known = {*ops.defined, *_emitted}
    return {op for op in custom_operators(graph) if op not in known and op.namespace not in _OF_PYTORCH}
