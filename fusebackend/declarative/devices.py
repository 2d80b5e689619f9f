"""The types of device on which operators can run: a kernel may be there for GPUs alone, and this machine may have none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

_OF_PYTORCH = ("aten", "prims", "prim", "inductor")
_ANY = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU", "mtia": "MTIA"}


def devices_of(operator: torch._ops.OpOverload) -> frozenset[str] | None:
    """The types of device that an operator has a kernel for, as registered; None for one that runs on all, or that does not say.

    An operator that launches Triton kernels (``torch.library.triton_op``) runs on GPUs, though it is registered for all.
    """
    if operator.namespace in _OF_PYTORCH:
        return None
    name = operator._schema.name
    if _launches_triton(name):
        return frozenset({"cuda", "xpu"})
    qualified = f"{name}.{operator._overloadname}" if operator._overloadname not in ("", "default") else name
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in _ANY):
        return None
    found = frozenset(d for d, key in _KEYS.items() if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key))
    return found or None


def lacking(graph: fx.Graph, device: str) -> torch._ops.OpOverload | None:
    """An operator in ``graph`` that has no kernel for a type of device; None if all have one."""
    return next((op for op in custom_operators(graph) if device not in (devices_of(op) or {device})), None)


def custom_operators(graph: fx.Graph) -> list[torch._ops.OpOverload]:
    """The operators in ``graph`` that are not PyTorch's own."""
    targets = dict.fromkeys(n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return [t for t in targets if t.namespace not in _OF_PYTORCH]


def available(device: str) -> bool:
    """Whether this machine has such a device."""
    if device == "cpu":
        return True
    module = getattr(torch, device, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


def spelled(devices: Iterable[str]) -> str:
    return " and ".join(sorted(devices))


def _launches_triton(name: str) -> bool:
    from torch._library import triton

    return name in triton.triton_ops_to_kernels
