"""Graphs as patterns see them, with fake values on devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def traced(function: Callable, *inputs: Any, dynamic: bool = False, device: str = "cuda") -> fx.Graph:
    """The graph of ``function``, functional and decomposed as by Inductor.

    Args:
        inputs: tensors, whose values do not matter, or tuples of sizes and, last, a dtype.
        dynamic: whether sizes are symbolic.
    """
    with FakeTensorMode():
        inputs = tuple(torch.empty(*x[:-1], dtype=x[-1]) if isinstance(x, tuple) else x for x in inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)
    fakes = []
    for x in inputs:
        seen = mode.from_tensor(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
        with mode:
            fakes.append(torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype, device="cpu"))
    with mode:  # traced on the CPU: where there is no GPU, some of PyTorch asks for one before it asks whether a tensor is fake
        graph = make_fx(torch.func.functionalize(lambda *a: function(*a)), decomposition_table=select_decomp_table())(*fakes).graph
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return graph
