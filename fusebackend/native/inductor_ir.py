"""What Inductor's lowerings of our operators become: calls as :mod:`fusebackend.native.direct_calls` makes them.

To be imported when Inductor compiles, since it imports Inductor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from fusebackend.native import direct_calls
from fusebackend.native.direct_calls import OPEN, is_fixed


class DirectCall(ir.FallbackKernel):
    """A call of an operator, past the dispatcher where generated Python code makes it and the library has a kernel for the device."""

    op_overload: torch._ops.OpOverload
    _callee: str | None = None  # the name of what the generated code prepares

    def codegen(self, wrapper: Any) -> None:
        self._callee = None  # some versions generate Python first, and then C++ from the same nodes
        if not V.graph.cpp_wrapper and not V.graph.aot_mode and direct_calls.has_kernel(self.op_overload, self._device_type()):
            arguments = ", ".join(wrapper.val_to_arg_str(a) if is_fixed(a) else repr(OPEN) for a in self._arguments(self.inputs))
            self._callee = _prepared(wrapper, f"prepare({self.python_kernel_name}, {self._device_type()!r}, {arguments})")
        super().codegen(wrapper)

    def get_kernel_name(self) -> str:
        return self._callee or super().get_kernel_name()

    def codegen_args(self) -> list[str]:
        if self._callee is None:
            return super().codegen_args()
        tensors = [_Reference(cast(ir.IRNode, x).codegen_reference()) for x in self.inputs]
        return [V.graph.wrapper_code.val_to_arg_str(a) for a in self._arguments(tensors) if not is_fixed(a)]

    def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
        return super().codegen_kwargs(skip_out) if self._callee is None else []

    def _device_type(self) -> str:
        device = self.get_device()
        return device.type if device is not None else ""

    def _arguments(self, tensors: Any) -> list[Any]:
        """All arguments in the order of the schema, ``tensors`` in the places of tensors."""
        args, kwargs = self.unflatten_args(tensors, self.constant_args)
        kwargs = {**self.kwargs, **kwargs}
        return [*args, *(kwargs.get(a.name, a.default_value) for a in self.op_overload._schema.arguments[len(args) :])]


class _Reference:
    """A tensor's name in the generated code."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _prepared(wrapper: Any, expression: str) -> str:
    """The name of an expression's value, which the module of generated code computes when it is loaded."""
    while (parent := getattr(wrapper, "parent_wrapper", None)) is not None:  # of a subgraph, whose code is part of the same module
        wrapper = parent
    names: dict[str, str] = vars(wrapper).setdefault("_fusebackend_calls", {})
    if not names:
        wrapper.header.writeline("from fusebackend.native.direct_calls import OPEN, prepare")
    if expression not in names:
        names[expression] = f"direct_call_{len(names)}"
        wrapper.header.writeline(f"{names[expression]} = {expression}")
    return names[expression]


def _boxed(value: Any) -> Any:
    if not isinstance(value, ir.IRNode):
        return value
    return value.wrap_for_lowering() if hasattr(value, "wrap_for_lowering") else ir.TensorBox.create(value)


def register(op: torch._ops.OpOverload, layout_constraint: Any) -> None:
    """Gives an operator its lowering, as Inductor's ``make_fallback`` does."""

    def lowered(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(_boxed, DirectCall.create(op, *args, **kwargs))

    lowered._is_fallback_handler = True  # type: ignore[attr-defined]
    lowering.fallbacks.add(op)
    lowering.add_needs_realized_inputs(op)
    if layout_constraint is not None:
        lowering.add_layout_constraint(op, layout_constraint)
    lowering.register_lowering(op, type_promotion_kind=None)(lowered)
