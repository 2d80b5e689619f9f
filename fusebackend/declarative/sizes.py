"""Symbolic sizes of traces: their values in a match, and names for them that do not depend on the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fusebackend import fx_utils as g
from fusebackend.declarative.trace import Trace


def symbolic(shape: Sequence[Any]) -> list[tuple[int, torch.SymInt]]:
    """The symbolic sizes of a shape, each with its dim."""
    return [(d, s) for d, s in enumerate(shape) if isinstance(s, torch.SymInt)]


def evaluate(size: Any, values: Mapping[Any, Any]) -> Any:
    """A size, or a number that is computed from sizes, with ``values`` in place of its symbols; None if a symbol has no value."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat)):
        return size
    expression = size.node.expr
    if not expression.free_symbols <= values.keys():
        return None
    return sympy_interp(PythonReferenceAnalysis, dict(values), expression)


def unmet(trace: Trace, shapes: Sequence[Sequence[Any] | None]) -> Any:
    """A condition of the trace (``Trace.conditions``) that is not known to hold where its inputs have these ``shapes``, as a sympy
    expression in its symbols; None if all hold."""
    values: dict[Any, Any] = {}
    for placeholder, shape in zip(trace.inputs, shapes):
        if placeholder is not None and shape is not None:
            values.update({s.node.expr: shape[d] for d, s in symbolic(g.value(placeholder).shape) if s.node.expr.is_symbol})
    for condition in trace.conditions:
        known = condition.free_symbols <= values.keys()
        if not known or not statically_known_true(sympy_interp(PythonReferenceAnalysis, dict(values), condition)):
            return condition
    return None


def argument_names(trace: Trace, arguments: Sequence[str]) -> dict[Any, Any]:
    """A name for each symbolic size of a trace's inputs: ``x.size(0)``, after the first argument and dim that has it."""
    names: dict[Any, Any] = {}
    for argument, placeholder in zip(arguments, trace.inputs):
        for d, size in symbolic(g.value(placeholder).shape) if placeholder is not None else []:
            names.setdefault(size.node.expr, sympy.Symbol(f"{argument}.size({d})", integer=True, positive=True))
    return names


def describe(node: fx.Node, names: Mapping[Any, Any]) -> str:
    """The dtype, shape and strides of a node's value, with its symbolic sizes replaced by ``names``."""

    def spell(size: Any) -> str:
        return str(size.node.expr.xreplace(dict(names)) if isinstance(size, torch.SymInt) else size)

    value = g.value(node)
    if not isinstance(value, torch.Tensor):
        return str(value)
    shape, strides = (f"({', '.join(map(spell, sizes))})" for sizes in (value.shape, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')} of shape {shape} and strides {strides}"
