"""Other words for functions of PyTorch that programs also write out, operator by operator.

``F.layer_norm`` comes to another graph than a program's own ``(x - x.mean(-1)) * rsqrt(...)``, and so do their backwards. A search function
that calls such a function is therefore traced once more for each of its wordings, and found in programs that were written so. That is done
when a graph holds the operators that tell of the wording: a trace takes a second.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that PyTorch's norms compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dims(normalized_shape: Any) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _affine(normal: Any, weight: Any, bias: Any) -> Any:
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


def _layer_norm_by_mean_square(dtype: torch.dtype, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    x, dims = input.to(_wide(dtype)), _dims(normalized_shape)
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).pow(2).mean(dims, keepdim=True)
    return _affine((x - mean) * torch.rsqrt(variance + eps), weight, bias).to(dtype)


def _layer_norm_by_variance(dtype: torch.dtype, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    x, dims = input.to(_wide(dtype)), _dims(normalized_shape)
    mean, variance = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
    return _affine((x - mean) * torch.rsqrt(variance + eps), weight, bias).to(dtype)


def _layer_norm_divided(dtype: torch.dtype, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    x, dims = input.to(_wide(dtype)), _dims(normalized_shape)
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).pow(2).mean(dims, keepdim=True)
    return _affine((x - mean) / torch.sqrt(variance + eps), weight, bias).to(dtype)


def _mean_square(dtype: torch.dtype, input: Any, normalized_shape: Any, eps: float | None) -> tuple[Any, Any]:
    x = input.to(_wide(dtype))
    return x, x.pow(2).mean(_dims(normalized_shape), keepdim=True) + (torch.finfo(dtype).eps if eps is None else eps)


def _rms_norm_divided(dtype: torch.dtype, input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    x, mean_square = _mean_square(dtype, input, normalized_shape, eps)
    return _affine(x / torch.sqrt(mean_square), weight, None).to(dtype)


def _rms_norm_by_power(dtype: torch.dtype, input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    x, mean_square = _mean_square(dtype, input, normalized_shape, eps)
    return _affine(x * mean_square.pow(-0.5), weight, None).to(dtype)


def _rms_norm_weight_first(dtype: torch.dtype, input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    x, mean_square = _mean_square(dtype, input, normalized_shape, eps)
    return (_affine(x, weight, None) * torch.rsqrt(mean_square)).to(dtype)


_MEAN, _VARIANCE = aten.mean.dim, aten.var.correction
_RSQRT, _SQRT = aten.rsqrt.default, aten.sqrt.default
_POWER_OF_HALF = aten.pow.Tensor_Scalar, -0.5  # matches rsqrt, but its gradient is another

#: The wordings of each function, besides its own. Each is given the dtype of the result, then the function's arguments. With each stand the
#: operators that a graph holds which was written so; a pair is an operator with its second argument.
_WORDINGS: dict[Callable, tuple[tuple[Callable, frozenset[Any]], ...]] = {
    F.layer_norm: (
        (_layer_norm_by_mean_square, frozenset({_MEAN, _RSQRT})),
        (_layer_norm_by_variance, frozenset({_VARIANCE, _RSQRT})),
        (_layer_norm_divided, frozenset({_MEAN, _SQRT})),
    ),
    F.rms_norm: (
        (_rms_norm_divided, frozenset({_MEAN, _SQRT})),
        (_rms_norm_by_power, frozenset({_MEAN, _POWER_OF_HALF})),
        (_rms_norm_weight_first, frozenset({_MEAN, _RSQRT})),
    ),
}

# What Dynamo's graph holds for some of them, with the same arguments.
_BUILT_IN: dict[Any, Any] = {torch.rms_norm: F.rms_norm}

#: The operators that a wording may end in.
ENDS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, torch.ops.prims.convert_element_type.default})


def signs(graph: fx.Graph) -> tuple[frozenset[Any], ...]:
    """For each wording that a graph of Dynamo's has besides its own, the operators by which another graph tells of it."""
    own = [_WORDINGS[f] for f in map(_function_of, graph.nodes) if f is not None]
    return tuple(frozenset().union(*(w[min(i, len(w) - 1)][1] for w in own)) for i in range(max(map(len, own), default=0)))


def _function_of(node: fx.Node) -> Callable | None:
    """The function that a node calls, if it has other wordings."""
    found = _BUILT_IN.get(node.target, node.target) if node.op == "call_function" else None
    return found if found in _WORDINGS else None


def tells_of(graph: fx.Graph, operators: frozenset[Any]) -> bool:
    """Whether a graph holds them all."""

    def holds(sign: Any) -> bool:
        target, *argument = sign if isinstance(sign, tuple) else (sign,)
        return any(list(n.args[1:2]) == argument or not argument for n in graph.find_nodes(op="call_function", target=target))

    return all(map(holds, operators))


def reword(gm: fx.GraphModule, wording: int) -> None:
    """Puts each function in a graph of Dynamo's into its ``wording``-th wording, from 1; into its last where it has fewer."""
    tracer = fx.proxy.GraphAppendingTracer(gm.graph)
    for node in list(gm.graph.nodes):
        function = _function_of(node)
        if function is None:
            continue
        wordings = _WORDINGS[function]
        write, _ = wordings[min(wording, len(wordings)) - 1]
        bound = inspect.signature(function).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        with gm.graph.inserting_before(node):
            arguments = tree_map_only(fx.Node, lambda n: fx.Proxy(n, tracer), bound.arguments)
            result = write(node.meta["example_value"].dtype, **arguments)
        node.replace_all_uses_with(result.node)
        gm.graph.erase_node(node)
    gm.recompile()
