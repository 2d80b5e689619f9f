"""Calls of our operators past PyTorch's dispatcher, for Inductor's generated Python code.

What calling an operator costs the host is mostly its way through Python's bindings and the dispatcher: an argument is matched with the
schema, becomes an ``IValue``, then a value of the stable ABI, then what the kernel takes. The code that Inductor generates calls an
operator with tensors that are on the kernel's device and need no gradient, and with numbers and texts that are the same at each call. Here
these are read once, when the generated code is loaded; a call reads its tensors, and its sizes where they are dynamic, and runs the kernel.

The operator is called as ever where torch.profiler or a mode of the dispatcher would see the call, where an argument is of another type
than the kernel's, and where the kernel raises, so that errors are PyTorch's own. ``csrc/common/direct_call_python.cpp`` has the other half,
and fusebackend.native.inductor_ir what generates such calls.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import profiler

from fusebackend.native import loader


class _Open:
    def __repr__(self) -> str:
        return "OPEN"


#: Stands for an argument that is given at each call.
OPEN: Final = _Open()

#: Numbers of dtypes, ``c10::ScalarType``.
_SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}


def is_fixed(value: Any) -> bool:
    """Whether an argument can be read once: a number, a text, a dtype, None, or a list of integers."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(v, int) for v in value)
    return value is None or isinstance(value, (int, float, str)) or (isinstance(value, torch.dtype) and value in _SCALAR_TYPES)


def has_kernel(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether the library that is loaded has a kernel of the operator that can be called so."""
    functions = _functions()
    return functions is not None and functions.fusebackend_has_kernel(_name(op, device_type))


def prepare(op: torch._ops.OpOverload, device_type: str, *arguments: Any) -> Callable[..., Any]:
    """What calls ``op`` with ``arguments``, taking those that are :data:`OPEN` by position: tensors, lists of tensors, integers, lists of
    integers, or None. Where several tensors are returned, they are in a list.

    Args:
        op: an operator of this package that changes no argument.
        device_type: ``"cuda"`` or ``"cpu"``, where all tensors are.
        arguments: all of the operator's, in the order of its schema.
    """
    functions = _functions()
    if functions is None or not has_kernel(op, device_type):  # the code was generated where there was one
        return _by_dispatcher(op, arguments)
    return functions.fusebackend_direct_call(
        _name(op, device_type),
        op,
        tuple(_SCALAR_TYPES.get(a, a) if isinstance(a, torch.dtype) else a for a in arguments),
        OPEN,
        torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors,
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs,
        vars(profiler),
        "_is_profiler_enabled",
        torch._C._len_torch_dispatch_stack,
    )


def _by_dispatcher(op: torch._ops.OpOverload, arguments: tuple) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        values = iter(given)
        return op(*(next(values) if a is OPEN else a for a in arguments))

    return call


def _name(op: torch._ops.OpOverload, device_type: str) -> bytes:
    return f"{device_type.upper()}/{op._schema.name.removeprefix('fusebackend::')}".encode()


@functools.cache
def _functions() -> ctypes.PyDLL | None:
    """The library's functions that call Python; None without one that was built with Python's headers, and in a Python without a GIL."""
    library = loader.load().library
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # the library may have been built by another Python; objects lie otherwise in this one
        return None
    if library is None or not hasattr(library, "fusebackend_direct_call"):
        return None
    functions = ctypes.PyDLL(library._name, handle=library._handle)
    functions.fusebackend_has_kernel.argtypes = [ctypes.c_char_p]
    functions.fusebackend_has_kernel.restype = ctypes.c_bool
    functions.fusebackend_direct_call.argtypes = [ctypes.c_char_p, *[ctypes.py_object] * 8]
    functions.fusebackend_direct_call.restype = ctypes.py_object
    return functions
