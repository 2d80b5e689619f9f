"""Defines the operators of ``torch.ops.fusebackend``.

Schemas, tags and fakes are defined here (the stable ABI takes no tags before torch 2.12). The native library registers the kernels when it
is loaded: a call is dispatched in a third of the time of a Python custom operator. No operator has a gradient formula. Graphs are rewritten
after autograd has seen them, and a formula in Python would take time at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch
from torch._library.utils import get_layout_constraint_tag
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend.native import loader

_library = torch.library.Library("fusebackend", "FRAGMENT")
_structured: dict[torch._ops.OpOverload, bool] = {}
_indices: dict[torch._ops.OpOverload, dict[str, str]] = {}
_unpadded: set[torch._ops.OpOverload] = set()

#: A layout of :func:`define`: any order of the dims, without the gaps that Inductor may leave between rows.
UNPADDED: Final = "unpadded"

#: All operators of this package, and those that users made by ``load_kernel``.
defined: list[torch._ops.OpOverload] = []


def define(
    schema: str,
    *,
    fake: Callable,
    python_kernels: Mapping[str, Callable] | None = None,
    layout: torch.Tag | Literal["unpadded"] = torch.Tag.flexible_layout,
    tags: tuple[torch.Tag, ...] = (),
    structured: bool | None = None,
    indices: Mapping[str, str] | None = None,
) -> torch._ops.OpOverload:
    """Defines ``fusebackend::<schema>`` and returns its overload.

    Args:
        schema: e.g. ``"transpose_add(Tensor x, Tensor y, float alpha) -> Tensor"``.
        fake: computes the outputs' shapes, strides and dtypes on fake tensors; must not guard on sizes.
        python_kernels: kernels written in Python, by dispatch key, e.g. ``{"CPU": reference}``.
        layout: which memory layouts of its inputs the kernel accepts. The default is any, so that Inductor never copies for it;
            ``torch.Tag.needs_exact_strides``, ``torch.Tag.needs_fixed_stride_order`` and :data:`UNPADDED` restrict Inductor.
        tags: further tags.
        structured: whether a kernel that reads the outputs may fault where they hold other values than this operator computes: places in
            memory, counts that must add up. Integers are, by default. Random numbers never take the place of such a value.
        indices: the arguments that hold indices, each with the argument that says below what they must be: of several, below the least.

    An operator without tensor arguments, by which Python asks the library for a fact, has its kernel registered for
    ``CompositeExplicitAutograd``. :func:`ask` calls it, for its fake too.
    """
    name = schema.split("(")[0]
    # Inductor pads nothing that an operator with this tag reads. What else the tag says it heeds where the node says so (`holds_strides`).
    tag = torch.Tag.needs_exact_strides if layout == UNPADDED else layout
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, tag, *tags))
    for key, kernel in (python_kernels or {}).items():
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"fusebackend::{name}", fake, lib=_library)
    op = getattr(torch.ops.fusebackend, name).default
    if structured is not None:
        _structured[op] = structured
    _indices[op] = dict(indices or {})
    if layout == UNPADDED:
        _unpadded.add(op)
    defined.append(op)
    return op


def define_facts(schema: str) -> Callable[..., dict[str, float]]:
    """Defines an operator without tensor arguments that tells facts of a kernel: ``"blocks=12 threads=256"``. It does not appear in graphs.

    Returns:
        What asks it by :func:`facts`.
    """

    def fake(*arguments: Any) -> str:
        with _disable_current_modes():
            return op(*arguments)

    op = define(schema, fake=fake)
    return functools.partial(facts, op)


def facts(op: Callable[..., str], *arguments: Any) -> dict[str, float]:
    """The facts that an operator tells, as those of :func:`define_facts` do; where tensors are fake too."""
    with _disable_current_modes():
        text = op(*arguments)
    return {name: float(number) for name, number in (fact.split("=") for fact in text.split())}


def ask(name: str, *arguments: Any, default: Any = None) -> Any:
    """The library's answer to ``fusebackend::<name>``, an operator without tensor arguments.

    Args:
        default: the answer where there is no library, whose kernels nothing calls then.

    Raises:
        RuntimeError: there is no library and no default, or the operator refuses the arguments.
    """
    library = loader.load()
    if library.path is not None:
        return _answer(name, *arguments)
    if default is None:
        raise RuntimeError(f"no native library: {library.reason}")
    return default


@functools.cache
def _answer(name: str, *arguments: Any) -> Any:
    with _disable_current_modes():  # a fake tensor mode, when a fake asks
        return getattr(torch.ops.fusebackend, name).default(*arguments)


def holds_strides(op: torch._ops.OpOverload) -> bool:
    """Whether Inductor must give an operator inputs that lie in memory as the graph says: by its tag, by what PyTorch assumes of custom
    operators without one, or as :func:`define` was told."""
    return op not in _unpadded and get_layout_constraint_tag(op) is torch.Tag.needs_exact_strides


def with_self_by_position(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call, one named ``self`` by position: by name, or where it is omitted, PyTorch's ``normalize_function``, through
    which Inductor passes what must hold its strides, calls it ``input``."""
    names = [a.name for a in op._schema.arguments]
    if "self" not in names or names.index("self") < len(args):
        return args, kwargs
    moved = op._schema.arguments[len(args) : names.index("self") + 1]
    left = {name: value for name, value in kwargs.items() if name not in {a.name for a in moved}}
    return (*args, *(kwargs.get(a.name, a.default_value) for a in moved)), left


def is_structured(op: torch._ops.OpOverload, output: torch.Tensor) -> bool:
    """Whether an output means something to kernels that read it, so that no other values will do: as :func:`define` says, and by default
    integers that an operator computes which is not PyTorch's."""
    if op.namespace in ("aten", "prims", "inductor"):
        return False
    return _structured.get(op, not (output.is_floating_point() or output.is_complex() or output.dtype is torch.bool))


def indices_of(op: torch._ops.OpOverload) -> Mapping[str, str]:
    """The arguments of an operator that hold indices, each with the argument that bounds them, as :func:`define` was told."""
    return _indices.get(op, {})
