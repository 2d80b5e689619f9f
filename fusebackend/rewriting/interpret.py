"""Runs Inductor's pipeline up to the rewritten graph, and then that graph as it is, without generating code.

``explain`` and ``options={"fuse.interpret": True}`` use it: decompositions, partitioner and passes, ours among them, are the same, and it
takes a fraction of the time. If a result is right here and wrong compiled, the cause is in code generation.

Run as it is, a graph rounds at each node of 16 bits; the code that Inductor generates keeps fp32 between them, and so do replacements. What
the one computes of a rounded tensor and the other of an unrounded one does not fit together: a graph says how it is run
(:func:`rounds_each_node`). Where only what would be compiled is of interest, it says that of a compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx as inductor
from torch._inductor.virtualized import V

_ROUNDS = "fusebackend_rounds_each_node"


def rounds_each_node(graph: fx.Graph) -> bool:
    """Whether a graph of 16 bits is run with the roundings that its nodes stand for, as eager mode does, and not as generated code."""
    module = graph.owning_module
    return module is not None and bool(module.meta.get(_ROUNDS))


def inner_compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, is_inference: bool = False, as_compiled: bool = False, **_: Any
) -> Callable:
    """Takes the place of Inductor's ``compile_fx_inner``: the steps before code generation, then the graph itself.

    Args:
        as_compiled: whether replacements are those of a compile, though they round otherwise than the rest of the graph is run.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.meta[_ROUNDS] = not as_compiled
    inductor.view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
    with V.set_fake_mode(fake_mode):
        inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
    gm.recompile()
    return make_boxed_func(gm.forward)


#: Inductor settings under which a graph can be interpreted: no cache may hand back generated code.
PATCHES = {"force_disable_caches": True, "triton.cudagraphs": False, "freezing": False}
