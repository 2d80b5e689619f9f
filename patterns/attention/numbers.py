"""Numbers in graphs: what scales a tensor, and tensors whose elements are all the same number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.patterns.attention.dims import is_cast, is_view

aten, prims = torch.ops.aten, torch.ops.prims

_FUNCTIONS = {
    aten.sqrt.default: math.sqrt,
    aten.rsqrt.default: lambda x: 1 / math.sqrt(x),
    aten.reciprocal.default: lambda x: 1 / x,
    aten.neg.default: lambda x: -x,
}
_MULTIPLICATIONS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})
_DEPTH = 6


def uniform(value: Any, depth: int = _DEPTH) -> float | None:
    """The number that all elements of ``value`` are, if that is known; a number is its own value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not g.is_tensor(value) or depth == 0:
        return None
    node: fx.Node = value
    dtype = g.value(node).dtype
    if not dtype.is_floating_point and dtype not in (torch.int64, torch.int32):
        return None
    try:
        found = _uniform(node, depth)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return None if found is None else rounded(found, dtype)


def rounded(number: float, dtype: torch.dtype) -> float:
    """The nearest number of that type."""
    with _disable_current_modes():  # a graph may be rewritten under a fake tensor mode
        return torch.tensor(number, dtype=torch.float64).to(dtype).double().item()


def _uniform(node: fx.Node, depth: int) -> float | None:
    if node.target is aten.full.default:
        return uniform(node.args[1])
    if node.target is aten.scalar_tensor.default:
        return uniform(node.args[0])
    if node.op == "get_attr" or node.target is aten.lift_fresh_copy.default:
        return _constant(node)
    if node.target is aten.copy.default:
        return uniform(node.args[1], depth - 1)
    if is_view(node) or is_cast(node) or node.target is prims.convert_element_type.default:
        return uniform(node.args[0], depth - 1)
    if node.target in _FUNCTIONS:
        operand = uniform(node.args[0], depth - 1)
        return None if operand is None else _FUNCTIONS[node.target](operand)
    if node.target in _MULTIPLICATIONS or node.target in _DIVISIONS:
        pair = [uniform(a, depth - 1) for a in node.args[:2]]
        if node.kwargs or pair[0] is None or pair[1] is None:
            return None
        return pair[0] * pair[1] if node.target in _MULTIPLICATIONS else pair[0] / pair[1]
    return None


def _constant(node: fx.Node) -> float | None:
    """A tensor that the program made of a number."""
    attribute: Any = node.args[0] if node.target is aten.lift_fresh_copy.default else node
    if not isinstance(attribute, fx.Node) or attribute.op != "get_attr" or node.graph.owning_module is None:
        return None
    held = getattr(node.graph.owning_module, str(attribute.target), None)
    held = getattr(held, "constant", None) if isinstance(held, torch._subclasses.FakeTensor) else held
    if not isinstance(held, torch.Tensor) or held.numel() != 1:
        return None
    if held.device.type != "cpu" and (not held.is_cuda or torch.cuda.is_current_stream_capturing()):
        return None
    with _disable_current_modes():
        return float(held.item())


#: Sums and products of such numbers, in the few steps that are followed, hide nothing.
_MODEST = 1e4
_ARITHMETIC = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.abs.default, aten.pow.Scalar, aten.cat.default),
        *(aten.minimum.default, aten.maximum.default, aten.slice.Tensor, aten.select.int, aten.full.default, aten.pow.Tensor_Tensor),
        *(prims.convert_element_type.default, prims.iota.default, aten.cumsum.default),
    }
)


def is_of_positions(node: fx.Node) -> bool:
    """Whether ``node`` is computed from positions and other integers alone, by arithmetic that gives no infinities, as ALiBi is: it is no
    mask."""
    reached = [node]
    for each in reached:
        if _holds_integers(each):
            continue
        if each.op != "call_function" or not (each.target in _ARITHMETIC or is_view(each) or _divides_by_a_power(each)):
            return False
        if _holds_large_numbers(each):
            return False
        reached += [i for i in each.all_input_nodes if i not in reached]
        if len(reached) > 64:
            return False
    return True


_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
#: Of one tensor of modest numbers they make others.
_OF_ONE_TENSOR = frozenset(
    {
        *(aten.embedding.default, aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default),
        *(aten.slice.Tensor, aten.select.int, aten.neg.default, aten.sigmoid.default, aten.tanh.default, aten.relu.default),
        *(aten.alias.default, aten.detach.default, aten.unsqueeze.default, aten.squeeze.dim, aten.constant_pad_nd.default),
    }
)
_OF_SEVERAL = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.cat.default})


def is_purely_learned(node: fx.Node) -> bool:
    """Whether a bias that has a gradient is nothing but what is learned, which hides nothing, looked up or not, or products of matrices: no
    mask was chosen in it or added to it."""
    stack = [(node, False)]  # with whether anything else was joined with it
    for _ in range(64):
        if not stack:
            return True
        each, joined = stack.pop()
        if _holds_integers(each) or each.target in _PRODUCTS:
            continue
        if each.op != "call_function":
            if joined:
                return False
            continue
        follows = each.target in _OF_ONE_TENSOR or each.target in _OF_SEVERAL or is_view(each) or is_cast(each)
        read = {i: uniform(i) for i in each.all_input_nodes if not _holds_integers(i)}
        if not follows or _holds_large_numbers(each) or any(n is not None and not abs(n) <= _MODEST for n in read.values()):
            return False
        tensors = [i for i, number in read.items() if number is None]
        stack += [(i, joined or len(tensors) > 1) for i in tensors]
    return False


def _holds_large_numbers(node: fx.Node) -> bool:
    """Among its arguments."""
    found = list[float]()
    fx.node.map_aggregate((node.args, node.kwargs), lambda a: found.append(a) if isinstance(a, float) else None)
    return any(not abs(a) <= _MODEST for a in found)


def _holds_integers(node: fx.Node) -> bool:
    return g.is_tensor(node) and not g.value(node).dtype.is_floating_point and not g.value(node).dtype.is_complex


def _divides_by_a_power(node: fx.Node) -> bool:
    """Of a number, which is never 0."""
    divisor: Any = None
    if node.target is aten.reciprocal.default:
        divisor = node.args[0]
    elif node.target is aten.div.Tensor:
        divisor = node.args[1]
    if isinstance(divisor, (int, float)):
        return divisor != 0
    return isinstance(divisor, fx.Node) and divisor.target is aten.pow.Scalar and float(divisor.args[0]) > 0  # type: ignore[arg-type]


def scaling(node: Any) -> tuple[fx.Node, float] | None:
    """(x, factor) if ``node`` is ``factor * x``."""
    if not g.is_tensor(node) or node.kwargs:
        return None
    if node.target is aten.neg.default:
        return node.args[0], -1.0
    if node.target in _MULTIPLICATIONS:
        for x, number in (node.args, reversed(node.args)):
            factor = uniform(number)
            if g.is_tensor(x) and factor is not None and _keeps_shape(node, x):
                return (x, factor) if _is_usable(factor) else None
    if node.target in _DIVISIONS:
        factor = uniform(node.args[1])
        if g.is_tensor(node.args[0]) and factor is not None and _is_usable(factor) and _keeps_shape(node, node.args[0]):
            return node.args[0], 1 / factor
    return None


def _is_usable(factor: float) -> bool:
    return math.isfinite(factor) and 1e-30 < abs(factor) < 1e30


def _keeps_shape(node: fx.Node, x: fx.Node) -> bool:
    return g.same_sizes(g.value(node).shape, g.value(x).shape)


def same_number(a: float, b: float) -> bool:
    """But for the rounding of products of scalings."""
    return math.isclose(a, b, rel_tol=1e-6)
