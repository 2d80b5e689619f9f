"""Graphs as patterns see them, with fake values on devices that need not be there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from fusebackend.rewriting.pattern import Match, Pattern


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


#: Inductor's, which leave convolutions whole.
_WITH_CONVOLUTIONS = {op: fn for op, fn in select_decomp_table().items() if "aten.convolution." not in str(op)}


def traced_joint(
    fn: Callable, args: Sequence[torch.Tensor], backward: Sequence[int] = (), device: str = "cuda", dynamic: bool = False
) -> fx.Graph:
    """The joint graph of ``fn``, whose convolutions are whole, as if on ``device``.

    It is traced on the CPU: autograd asks for a GPU where tensors are on one.

    Args:
        backward: the positions of the arguments whose gradients are asked for.
        dynamic: whether the sizes of the first argument are symbolic; the others are parameters.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)
    static = [not dynamic or i > 0 for i in range(len(args))]
    fakes = [mode.from_tensor(a.detach(), static_shapes=s).requires_grad_(i in backward) for i, (a, s) in enumerate(zip(args, static))]
    with mode, enable_python_dispatcher():  # decompositions that take symbolic sizes
        grads = [torch.empty_like(y := fn(*fakes)).as_strided(y.shape, y.stride())] if backward else []

        def joint(*a: torch.Tensor) -> Any:
            inputs = a[: len(args)]
            y = fn(*inputs)
            return (y, *torch.autograd.grad(y, [inputs[i] for i in backward], a[-1])) if backward else y

        graph = make_fx(joint, decomposition_table=_WITH_CONVOLUTIONS)(*fakes, *grads).graph
        graph.eliminate_dead_code()
        for node in graph.nodes:
            node.meta["val"] = tree_map_only(
                torch.Tensor, lambda t: t.new_empty_strided(t.shape, t.stride(), device=device), node.meta.get("val")
            )
    return graph


def estimates(graph: fx.Graph, patterns: Sequence[Pattern]) -> list[Any]:
    """What each pattern says of each of its matches, in the order of the graph. All anchors match."""
    found = []
    for node, pattern in itertools.product(graph.nodes, patterns):
        if node.op == "call_function" and node.target in pattern.anchors:
            match = pattern.match(node)
            assert isinstance(match, Match), match
            found.append(pattern.estimate(match))
    return found
