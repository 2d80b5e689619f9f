"""The family's operators: PyTorch's attention on CPUs, and where a mask hides a row wholly, what a program computes that writes it out.

PyTorch's kernel gives zeros where a mask of -inf hides all keys of a row, and keeps of each row the logarithm of the sum of exponentials,
in which the sum is lost beside a large finite mask. Both differ from attention that is written out. Such rows are rare: a mask of which
it is not known before run time is looked at first, and where it has one, everything is computed as it was written.

PyTorch's operator can't stand in graphs itself: it is tagged as one that draws random numbers, since it might drop out.
"""

from __future__ import annotations

import math

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops

aten = torch.ops.aten

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: Those of PyTorch's kernel, but for float64.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: A row whose largest mask is less is computed as it was written: fp32 keeps 13 bits of the logarithm of a sum beside it.
LEAST = -1024.0


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, sees_all_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``fusebackend::sdpa`` computes: ``softmax(scale * q @ k.mT + mask) @ v`` in fp32, rounded once.

    Args:
        q, k, v: (batch, heads, queries or keys, D), of one dtype.
        mask: four dims, each of size 1 or that of the scores, in q's dtype or float32. It may be -inf. None beside ``causal``.
        causal: query i sees keys 0 to i.
        sees_all_rows: whether it is known that each row of the mask is somewhere at least ``LEAST``, or that rows of -inf are to give
            zeros; otherwise the mask is looked at.

    Returns:
        The result, with the heads of a token one behind the other in memory, and the logsumexp of each row, by tokens too, for the
        backward. The latter means nothing where a row of the mask is below ``LEAST``.
    """
    scores = _scores(q, k, mask, scale, causal)
    return _by_tokens(scores.softmax(-1) @ v.float(), q.dtype), _by_tokens(scores.logsumexp(-1), torch.float32)


def reference_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, laid out as the result is."""
    weights, grad = _scores(q, k, mask, scale, causal).softmax(-1), grad.float()
    dweights = grad @ v.float().mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
    found = dscores @ k.float(), dscores.mT @ q.float(), weights.mT @ grad
    return _by_tokens(found[0], q.dtype), _by_tokens(found[1], q.dtype), _by_tokens(found[2], q.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    scores = scale * q.float() @ k.float().mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores if mask is None else scores + mask.float()


def _by_tokens(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x``, (batch, heads, tokens, ...), with the heads of a token one behind the other, and the strides of dims of size 1 too."""
    _, heads, tokens, *width = (max(size, 1) for size in x.shape)
    each = math.prod(width)
    strides = (tokens * heads * each, each, heads * each, *[1] * len(width))
    x = x.to(dtype)
    if all(size == 1 or stride == wanted for size, stride, wanted in zip(x.shape, x.stride(), strides)):
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _hides_rows(mask: torch.Tensor | None) -> bool:
    """Whether there may be a row without a key that it sees; NaN is not seen."""
    return mask is not None and mask.numel() > 0 and not bool((mask.amax(-1) >= LEAST).all())


def _kernel(q, k, v, mask, scale, causal, sees_all_rows):
    _check("sdpa", q, k, v, mask, causal)
    if _is_empty(q, k) or (not sees_all_rows and _hides_rows(mask)):
        return reference(q, k, v, mask, scale, causal, sees_all_rows)
    out, logsumexp = _FLASH(_rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=_along_keys(mask), scale=scale)
    return _by_tokens(out, q.dtype), _by_tokens(logsumexp, torch.float32)


def _kernel_backward(grad, q, k, v, mask, out, logsumexp, scale, causal, sees_all_rows):
    _check_backward(grad, q, k, v, mask, out, logsumexp, causal)
    if _is_empty(q, k) or (not sees_all_rows and _hides_rows(mask)):
        return reference_backward(grad, q, k, v, mask, scale, causal)
    operands = _rows(grad), _rows(q), _rows(k), _rows(v), out, logsumexp
    found = _FLASH_BACKWARD(*operands, 0.0, causal, attn_mask=_along_keys(mask), scale=scale)
    return tuple(_by_tokens(x, q.dtype) for x in found)


def _is_empty(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the kernel reads it: contiguous rows, none of which overlaps the next."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _along_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 or mask.stride(-1) == 1 else mask.contiguous()


def _check(name: str, q, k, v, mask, causal) -> None:
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


def _empty(like: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, width = like.shape
    return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _fake(q, k, v, mask, scale, causal, sees_all_rows):
    _check("sdpa", q, k, v, mask, causal)
    batch, heads, queries, _ = q.shape
    return _empty(q), q.new_empty((batch, queries, heads), dtype=torch.float32).transpose(1, 2)


def _check_backward(grad, q, k, v, mask, out, logsumexp, causal) -> None:
    name = "sdpa_backward"
    _check(name, q, k, v, mask, causal)
    for tensor in (grad, out):
        arguments.check_device(name, q, tensor=tensor)
        arguments.check_dtype(name, q, tensor=tensor)
        torch._check(arguments.same_sizes(tensor.shape, q.shape), lambda: f"{name}: the sizes of grad and out do not fit")
    arguments.check_device(name, q, logsumexp=logsumexp)
    right = logsumexp.dtype == torch.float32 and arguments.same_sizes(logsumexp.shape, q.shape[:-1])
    torch._check(right, lambda: f"{name}: this is not the logsumexp of sdpa")


def _fake_backward(grad, q, k, v, mask, out, logsumexp, scale, causal, sees_all_rows):
    _check_backward(grad, q, k, v, mask, out, logsumexp, causal)
    return _empty(q), _empty(k), _empty(v)


sdpa = ops.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, bool sees_all_rows) -> (Tensor out, Tensor logsumexp)",
    fake=_fake,
    python_kernels={"CPU": _kernel},
    layout=torch.Tag.needs_exact_strides,
)
sdpa_backward = ops.define(
    "sdpa_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor logsumexp, float scale, bool causal,"
    " bool sees_all_rows) -> (Tensor dq, Tensor dk, Tensor dv)",
    fake=_fake_backward,
    python_kernels={"CPU": _kernel_backward},
    layout=torch.Tag.needs_exact_strides,
)
