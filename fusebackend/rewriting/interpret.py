"""Runs Inductor's pipeline up to the rewritten graph, and then that graph as it is, without generating code.

``explain`` and ``options={"fuse.interpret": True}`` use it: decompositions, partitioner and passes, ours among them, are the same, and it
takes a fraction of the time. If a result is right here and wrong compiled, the cause is in code generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx as inductor
from torch._inductor.virtualized import V


def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], *, is_inference: bool = False, **_: Any) -> Callable:
    """Takes the place of Inductor's ``compile_fx_inner``: the steps before code generation, then the graph itself."""
    inductor.view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
    with V.set_fake_mode(fake_mode):
        inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
    gm.recompile()
    return make_boxed_func(gm.forward)


#: Inductor settings under which a graph can be interpreted: no cache may hand back generated code.
PATCHES = {"force_disable_caches": True, "triton.cudagraphs": False, "freezing": False}
