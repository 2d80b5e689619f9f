"""The operator ``fusebackend::foreach_cast`` and its reference in PyTorch. The kernel is in csrc/foreach_cast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusebackend.native import arguments, ops

_HALVES = frozenset({torch.bfloat16, torch.float16})
#: From which dtype to which.
CASTS = frozenset({*((torch.float32, half) for half in _HALVES), *((half, torch.float32) for half in _HALVES)})


def reference(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """What the kernel computes.

    Args:
        tensors: at least one, all of one dtype and on one device, of any sizes. Each fills a stretch of memory without gaps, in any order
            of its dims.
        dtype: of the results. With that of ``tensors`` it is one of ``CASTS``.

    Returns:
        ``[t.to(dtype) for t in tensors]``, of the same sizes and strides, each in memory of its own. Numbers are rounded to the nearest,
        ties to even, as ``to`` does.
    """
    return [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device).copy_(t) for t in tensors]


def _fake(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    first = tensors[0]
    supported = (first.dtype, dtype) in CASTS
    torch._check(supported, lambda: f"foreach_cast: {first.dtype} to {dtype} is not supported; float32 to 16-bit floats and back are")
    for i, t in enumerate(tensors):
        name = f"tensors[{i}]"
        torch._check(t.dtype == first.dtype, lambda: f"foreach_cast: {name} is {t.dtype}, others {first.dtype}; one dtype is needed")  # noqa: B023
        arguments.check_device("foreach_cast", first, **{name: t})
        torch._check(arguments.covers_memory(t), lambda: f"foreach_cast: {name} has gaps, or elements that share memory")  # noqa: B023
    return [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device) for t in tensors]


def _on_cpu(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    _fake(tensors, dtype)
    return reference(tensors, dtype)


# Implemented by csrc/foreach_cast on GPUs.
foreach_cast = ops.define(
    "foreach_cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    fake=_fake,
    python_kernels={"CPU": _on_cpu},
    layout=torch.Tag.needs_exact_strides,
)
