"""Fake inputs of a fake mode of their own, so that compiling a part of a graph adds no guards to that graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fusebackend import fx_utils as g
from fusebackend.profitability.unfit import Unfit


def symbols_of(nodes: Sequence[fx.Node]) -> dict[Any, int]:
    """Every symbol in the sizes of the nodes' values, in the order of occurrence, with its hint.

    Raises:
        Unfit: a size has no hint.
    """
    found: dict[Any, int] = {}
    for node in nodes:
        value = g.value(node)
        sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                if g.hint(size) is None:
                    raise Unfit(f"the size {size} is not known before run time")
                for symbol in sorted(size.node.expr.free_symbols, key=str):
                    if symbol not in found:
                        found[symbol] = _hint_of(symbol, size.node.shape_env)
    return found


def _hint_of(symbol: Any, shape_env: Any) -> int:
    hint = g.hint(shape_env.create_symintnode(symbol, hint=None))
    if hint is None:
        raise Unfit(f"the size {symbol} is not known before run time")
    return hint


def fresh_inputs(
    inputs: Sequence[fx.Node], symbols: Mapping[Any, int], orders: Mapping[fx.Node, tuple[int, ...]] | None = None
) -> tuple[FakeTensorMode, list[Any], dict[Any, Any]]:
    """One symbolic size for each of ``symbols``, then fake values like those of ``inputs``.

    Args:
        symbols: from :func:`symbols_of`.
        orders: of inputs that are to be dense: their dims from the outermost to the innermost in memory.

    Returns:
        The fake mode, the values, and the new symbol for each old one.

    Raises:
        Unfit: an input is a sparse tensor, or one of another layout.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    substitute: dict[Any, Any] = {}
    fakes: list[Any] = []
    for i, (symbol, hint) in enumerate(symbols.items()):
        source = ConstantSource(f"size_{i}")
        substitute[symbol] = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        fakes.append(env.create_symintnode(substitute[symbol], hint=hint, source=source))

    def size(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr.xreplace(substitute)
        return int(expression) if expression.is_number else env.create_symintnode(expression, hint=g.hint(value))

    for node in inputs:
        value = g.value(node)
        if not isinstance(value, torch.Tensor):
            fakes.append(size(value))
            continue
        if value.layout is not torch.strided:
            raise Unfit(f"{node.name} is a {value.layout} tensor")
        with mode:
            shape, strides = [*map(size, value.shape)], [*map(size, value.stride())]
            if orders and node in orders:
                fakes.append(torch.empty_permuted(shape, orders[node], dtype=value.dtype, device=value.device))
            else:
                fakes.append(torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device))
    return mode, fakes, substitute
