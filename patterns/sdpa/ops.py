"""The family's operator: PyTorch's attention on CPUs, and where a mask hides a row wholly, what a program computes that writes it out.

PyTorch's kernel gives zeros where a mask of -inf hides all keys of a row, which attention that is written out does not. Such rows are rare:
a mask of which it is not known before run time is looked at first, and where it has one, everything is computed as it was written.

PyTorch's operator can't stand in graphs itself: it is tagged as one that draws random numbers, since it might drop out.
"""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops

aten = torch.ops.aten

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
#: Those of PyTorch's kernel, but for float64.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: A row whose largest mask is less is taken for one that hides all keys, and computed as it was written.
LEAST = -1024.0


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, sees_all_rows: bool
) -> torch.Tensor:
    """What ``fusebackend::sdpa`` computes: ``softmax(scale * q @ k.mT + mask) @ v`` in fp32, rounded once.

    Args:
        q, k, v: (batch, heads, queries or keys, D), of one dtype.
        mask: four dims, each of size 1 or that of the scores, in q's dtype or float32. It may be -inf. None beside ``causal``.
        causal: query i sees keys 0 to i.
        sees_all_rows: whether it is known that each row of the mask is somewhere at least ``LEAST``, or that rows of -inf are to give
            zeros; otherwise the mask is looked at.

    Returns:
        The result, with the heads of a token one behind the other in memory.
    """
    scores = scale * q.float() @ k.float().mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores + mask.float()
    return _by_tokens((scores.softmax(-1) @ v.float()).to(q.dtype))


def _by_tokens(x: torch.Tensor) -> torch.Tensor:
    """``x``, (batch, heads, tokens, D), with the heads of a token one behind the other, and the strides of dims of size 1 too."""
    _, heads, tokens, width = (max(size, 1) for size in x.shape)
    strides = (tokens * heads * width, width, heads * width, 1)
    if all(size == 1 or stride == wanted for size, stride, wanted in zip(x.shape, x.stride(), strides)):
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _hides_rows(mask: torch.Tensor | None) -> bool:
    """Whether there may be a row without a key that it sees; NaN is not seen."""
    return mask is not None and mask.numel() > 0 and not bool((mask.amax(-1) >= LEAST).all())


def _kernel(q, k, v, mask, scale, causal, sees_all_rows):
    _check(q, k, v, mask, causal)
    if _is_empty(q, k) or (not sees_all_rows and _hides_rows(mask)):
        return reference(q, k, v, mask, scale, causal, sees_all_rows)
    out, _ = _FLASH(_rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=_along_keys(mask), scale=scale)
    return _by_tokens(out)


def _is_empty(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the kernel reads it: contiguous rows, none of which overlaps the next."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _along_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 or mask.stride(-1) == 1 else mask.contiguous()


def _check(q, k, v, mask, causal) -> None:
    name = "sdpa"

    def check(holds: bool, message: str) -> None:
        torch._check(holds, lambda: f"{name}: {message}")

    check(q.dim() == 4, "q must be (batch, heads, queries, D)")
    check(q.dtype in DTYPES, f"q must be float32, bfloat16 or float16, not {q.dtype}")
    arguments.check_device(name, q, k=k, v=v)
    arguments.check_dtype(name, q, k=k, v=v)
    fits = (
        k.dim() == v.dim() == 4
        and arguments.same_sizes(k.shape, v.shape)
        and arguments.same_sizes((*q.shape[:2], q.shape[3]), (*k.shape[:2], k.shape[3]))
    )
    check(fits, f"the sizes of q, k and v, {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, do not fit")
    if mask is None:
        return
    check(not causal, "a mask beside causal")
    arguments.check_device(name, q, mask=mask)
    check(mask.dtype in (q.dtype, torch.float32), f"the mask must have q's dtype or float32, not {mask.dtype}")
    scores = (*q.shape[:-1], k.shape[-2])
    fits = mask.dim() == 4 and all(g.same_size(a, 1) or arguments.are_same(a, b) for a, b in zip(mask.shape, scores))
    check(fits, f"each dim of the mask, {tuple(mask.shape)}, must have the size 1 or that of the scores")


def _fake(q, k, v, mask, scale, causal, sees_all_rows):
    _check(q, k, v, mask, causal)
    batch, heads, queries, width = q.shape
    return q.new_empty((batch, queries, heads, width)).transpose(1, 2)


sdpa = ops.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, bool sees_all_rows) -> Tensor",
    fake=_fake,
    python_kernels={"CPU": _kernel},
    layout=torch.Tag.needs_exact_strides,
)
