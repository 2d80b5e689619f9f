"""Defines the operators of ``torch.ops.fusebackend``.

Schemas, tags and fakes are Python's (the stable ABI takes no tags before torch 2.12); the kernels are registered by the
native library when it is loaded, which dispatches in about 2 us where a Python custom operator takes 7. None has a formula
for its gradient: graphs are rewritten after autograd has been through them, and a formula written in Python would be asked at
every call, for another 8 us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

_library = torch.library.Library("fusebackend", "FRAGMENT")


def define(
    schema: str,
    *,
    fake: Callable,
    python_kernels: Mapping[str, Callable] | None = None,
    layout: torch.Tag = torch.Tag.flexible_layout,
    tags: tuple[torch.Tag, ...] = (),
) -> torch._ops.OpOverload:
    """Defines ``fusebackend::<schema>`` and returns its overload.

    Args:
        schema: e.g. ``"transpose_add(Tensor x, Tensor y, float alpha) -> Tensor"``.
        fake: computes the outputs' shapes, strides and dtypes on fake tensors; must not guard on sizes.
        python_kernels: kernels written in Python, by dispatch key, e.g. ``{"CPU": reference}``.
        layout: by default the kernel takes its inputs in any memory layout, so Inductor copies nothing for it; operators
            whose kernels don't name ``torch.Tag.needs_exact_strides`` or ``torch.Tag.needs_fixed_stride_order``.
        tags: further tags.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, layout, *tags))
    for key, kernel in (python_kernels or {}).items():
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"fusebackend::{name}", fake, lib=_library)
    return getattr(torch.ops.fusebackend, name).default
