"""The family's operators: schemas, fakes and PyTorch references. The kernels are in csrc/attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, loader, ops
from fusebackend.rewriting.device_facts import device_facts

#: Those that the kernels take. A bias has q's dtype or float32.
DTYPES = frozenset({torch.float16, torch.bfloat16})


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, biases: Sequence[torch.Tensor], scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``fusebackend::attention`` computes, in q's dtype (here in fp32 and rounded once, or in fp64).

    Args:
        q: (batch, heads, queries, D) or (batch, inner batch, heads, queries, D); a second batch dimension is for biases that depend on one
            of them, as the masks of shifted windows do. Any strides; rows that are not contiguous, or not aligned to 16 bytes, are copied.
        k, v: the same with keys in place of queries; v's last size may be another one. D is a multiple of 8 up to 128.
        biases: up to four tensors of as many dimensions as q, of each the size 1 or that of the scores (…, heads, queries, keys). They are
            added to the scaled scores and may be -inf. A size of 1 costs no memory; an expanded dimension neither.
        causal: query i sees keys 0 to i.

    Returns:
        ``softmax(scale * q @ k.mT + sum(biases)) @ v``, and the statistics of each row in fp32, (…, heads, queries, 2): the maximum of its
        scores, and the logarithm of the sum of ``exp(score - maximum)``. Together they are the logsumexp, in which the second one
        would be lost where all keys are masked by a large finite number. In memory, the heads of a token lie one behind the other:
        ``out.transpose(-3, -2)`` is contiguous.
    """
    scores, wide = _scores(q, k, biases, scale, causal), _wide(v)
    if scores.shape[-1] == 0:
        maximum = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        out, log_sum = scores @ wide, maximum
    else:
        maximum = scores.amax(-1, keepdim=True)
        weights = (scores - maximum).exp()
        total = weights.sum(-1, keepdim=True)
        out, log_sum = (weights @ wide) / total, total.log()
    return _by_tokens(out.to(q.dtype)), torch.cat([maximum, log_sum], -1).to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def reference_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
    causal: bool,
    bias_grads: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """What ``fusebackend::attention_backward`` computes: the gradients of :func:`reference`'s first result.

    Args:
        grad: that of ``out``; any strides.
        out, statistics: what ``attention`` returned.
        bias_grads: for each bias, whether its gradient is wanted.

    Returns:
        The gradients of q, k and v, laid out as ``out`` is, and a list of those of the biases that are wanted, contiguous, of the bias's
        sizes and dtype: summed in fp32, in the same order in every run, over the dimensions that are broadcast.
    """
    scores, wide = _scores(q, k, biases, scale, causal), _wide(grad)
    weights = ((scores - statistics[..., :1]) - statistics[..., 1:]).exp()
    dweights = wide @ _wide(v).mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    dq, dk, dv = scale * dscores @ _wide(k), scale * dscores.mT @ _wide(q), weights.mT @ wide
    dbiases = [dscores.sum_to_size(bias.shape).to(bias.dtype).contiguous() for bias, wanted in zip(biases, bias_grads) if wanted]
    return _by_tokens(dq.to(q.dtype)), _by_tokens(dk.to(q.dtype)), _by_tokens(dv.to(q.dtype)), dbiases


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _scores(q, k, biases, scale, causal) -> torch.Tensor:
    scores = scale * _wide(q) @ _wide(k).mT
    for bias in biases:
        scores = scores + _wide(bias)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _by_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def limits() -> tuple[int, int, int]:
    """The most biases, the largest head, and what the size of a head must be a multiple of. Without a library, whose operators nothing
    calls then, any numbers will do."""
    return ops.ask("attention_limits", default=(64, 1 << 62, 1))


def unavailable(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    missing = loader.load().why_not(device, attention, attention_backward)
    if missing or device.type != "cuda":
        return missing
    facts, needed = device_facts(device), ops.ask("attention_min_shared_bytes", default=0)
    if facts.capability[0] < 8:
        return "a GPU of compute capability 8.0 or later is needed, this one has {}.{}".format(*facts.capability)
    if facts.block_shared_bytes < needed:
        return f"a GPU with {needed} bytes of shared memory a block is needed, this one has {facts.block_shared_bytes}"
    return None


def _check(name: str, q, k, v, biases) -> None:
    def check(holds: bool, message: str) -> None:
        torch._check(holds, lambda: f"{name}: {message}")

    check(q.dim() in (4, 5), "q must be (batch, heads, queries, D), with one more batch dimension or not")
    check(q.dtype in DTYPES, f"q must be bfloat16 or float16, not {q.dtype}")
    arguments.check_device(name, q, k=k, v=v)
    arguments.check_dtype(name, q, k=k, v=v)
    fits = (
        k.dim() == v.dim() == q.dim()
        and arguments.same_sizes(q.shape[:-2], k.shape[:-2])
        and arguments.same_sizes(k.shape[:-1], v.shape[:-1])
        and arguments.are_same(q.shape[-1], k.shape[-1])
    )
    check(fits, f"the sizes of q, k and v, {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, do not fit")
    most_biases, most, multiple = limits()
    for size in (g.hint(q.shape[-1]), g.hint(v.shape[-1])):
        check(size is None or (0 < size <= most and size % multiple == 0), f"D must be a multiple of {multiple} up to {most}, not {size}")
    check(len(biases) <= most_biases, f"at most {most_biases} biases")
    scores = (*q.shape[:-1], k.shape[-2])
    for bias in biases:
        arguments.check_device(name, q, bias=bias)
        check(bias.dtype in (q.dtype, torch.float32), f"a bias must have q's dtype or float32, not {bias.dtype}")
        fits = bias.dim() == q.dim() and all(g.same_size(a, 1) or arguments.are_same(a, b) for a, b in zip(bias.shape, scores))
        check(fits, f"a bias, {tuple(bias.shape)}, must have as many dimensions as q, each of size 1 or that of the scores")


def _empty_by_tokens(x: torch.Tensor, tokens, columns) -> torch.Tensor:
    return x.new_empty((*x.shape[:-3], tokens, x.shape[-3], columns)).transpose(-3, -2)


def _fake(q, k, v, biases, scale, causal):
    _check("attention", q, k, v, biases)
    return _empty_by_tokens(q, q.shape[-2], v.shape[-1]), q.new_empty((*q.shape[:-1], 2), dtype=torch.float32)


def _fake_backward(grad, q, k, v, biases, out, statistics, scale, causal, bias_grads):
    name = "attention_backward"
    _check(name, q, k, v, biases)
    for tensor in (grad, out):
        arguments.check_device(name, q, tensor=tensor)
        arguments.check_dtype(name, q, tensor=tensor)
        fits = arguments.same_sizes(tensor.shape, (*q.shape[:-1], v.shape[-1]))
        torch._check(fits, lambda: f"{name}: the sizes of grad and out do not fit")
    right = (
        statistics.dtype == torch.float32
        and arguments.same_sizes(statistics.shape, (*q.shape[:-1], 2))
        and arguments.is_contiguous(statistics)
        and statistics.device == q.device
    )
    torch._check(right, lambda: f"{name}: these are not the statistics of attention")
    torch._check(len(bias_grads) == len(biases), lambda: f"{name}: bias_grads must have a flag a bias")
    return (
        _empty_by_tokens(q, q.shape[-2], q.shape[-1]),
        _empty_by_tokens(k, k.shape[-2], k.shape[-1]),
        _empty_by_tokens(v, v.shape[-2], v.shape[-1]),
        [bias.new_empty(bias.shape) for bias, wanted in zip(biases, bias_grads) if wanted],
    )


attention = ops.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] biases, float scale, bool causal) -> (Tensor out, Tensor statistics)",
    fake=_fake,
    layout=torch.Tag.needs_exact_strides,
)
attention_backward = ops.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor[] biases, Tensor out, Tensor statistics, float scale,"
    " bool causal, bool[] bias_grads) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dbiases)",
    fake=_fake_backward,
    layout=torch.Tag.needs_exact_strides,
)
ops.define("attention_min_shared_bytes() -> int", fake=lambda: ops.ask("attention_min_shared_bytes"))
ops.define("attention_limits() -> (int biases, int head_dim, int head_dim_multiple)", fake=limits)
