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


#: Keys whose bits are one word, and what the number of queries is rounded up to (csrc/attention/attention.h).
_WORD = 64


def reference_mask_bits(mask: torch.Tensor) -> torch.Tensor:
    """What ``fusebackend::attention_mask_bits`` computes: a bit for each element of a boolean mask (…, queries, keys).

    Returns:
        int64, (…, words, queries rounded up to 64): bit i of word w of a query is its key 64 w + i. Bits of keys and queries that do not
        exist are 0.
    """
    queries, keys = mask.shape[-2:]
    padded = mask.new_zeros((*mask.shape[:-2], -(-queries // _WORD) * _WORD, -(-keys // _WORD) * _WORD))
    padded[..., :queries, :keys] = mask
    bits = padded.unflatten(-1, (-1, _WORD)).long() << torch.arange(_WORD, device=mask.device)
    return bits.sum(-1).mT.contiguous()


def mask_of_bits(bits: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """The mask of which ``bits`` are."""
    words = bits.mT[..., :queries, :].unsqueeze(-1)
    return (words >> torch.arange(_WORD, device=bits.device) & 1).flatten(-2)[..., :keys].bool()


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: Sequence[torch.Tensor],
    scale: float,
    causal: bool,
    kept: torch.Tensor | None = None,
    kept_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``fusebackend::attention`` computes, in q's dtype (here in fp32 and rounded once, or in fp64).

    Args:
        q: (batch, heads, queries, D) or (batch, inner batch, heads, queries, D); a second batch dimension is for biases that depend on one
            of them, as the masks of shifted windows do. Any strides; rows that are not contiguous, or not aligned to 16 bytes, are copied.
        k, v: the same with keys in place of queries; v's last size may be another one. D is a multiple of 8 up to 128.
        biases: up to four tensors of as many dimensions as q, of each the size 1 or that of the scores (…, heads, queries, keys). They are
            added to the scaled scores and may be -inf. A size of 1 costs no memory; an expanded dimension neither.
        causal: query i sees keys 0 to i.
        kept: of dropout, which probabilities are kept: the bits (``attention_mask_bits``) of a mask of the scores' sizes.
        kept_scale: what those that are kept are multiplied by.

    Returns:
        ``(softmax(scale * q @ k.mT + sum(biases)) * mask * kept_scale) @ v``, and the statistics of each row in fp32, (…, heads, queries,
        2): the maximum of its scores, and the logarithm of the sum of ``exp(score - maximum)``. Together they are the logsumexp, in which
        the second one would be lost where all keys are masked by a large finite number. In memory, the heads of a token lie one behind
        the other: ``out.transpose(-3, -2)`` is contiguous.
    """
    scores, wide = _scores(q, k, biases, scale, causal), _wide(v)
    if scores.shape[-1] == 0:
        maximum = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        out, log_sum = scores @ wide, maximum
    else:
        maximum = scores.amax(-1, keepdim=True)
        weights = (scores - maximum).exp()
        total = weights.sum(-1, keepdim=True)
        dropped = weights if kept is None else weights * _kept_factors(kept, kept_scale, weights)
        out, log_sum = (dropped @ wide) / total, total.log()
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
    wide_bias_grads: Sequence[bool] = (),
    kept: torch.Tensor | None = None,
    kept_scale: float = 1.0,
) -> list[torch.Tensor]:
    """What ``fusebackend::attention_backward`` computes: the gradients of :func:`reference`'s first result.

    Args:
        grad: that of ``out``; any strides.
        out, statistics: what ``attention`` returned; any strides. In rows whose second number, the logarithm, was negated, scores have no
            gradients, as in those that a mask replaced wholly. There it is log(2) at least, or the row has one key.
        bias_grads: for each bias, whether its gradient is wanted.
        wide_bias_grads: for each bias, whether its gradient is wanted in fp32, if any is; others have the bias's dtype.

    Returns:
        The gradients of q, k and v, laid out as ``out`` is, and behind them those of the biases that are wanted, contiguous, of the bias's
        sizes: summed in fp32, in the same order in every run, over the dimensions that are broadcast. One list: of lists beside tensors
        Inductor's C++ wrapper knows nothing.
    """
    scores, wide = _scores(q, k, biases, scale, causal), _wide(grad)
    maximum, log_sum = statistics.split(1, -1)
    marked = (log_sum < -0.5) & log_sum.isfinite()
    weights = ((scores - maximum) - torch.where(marked, -log_sum, log_sum)).exp()
    dweights, dropped = wide @ _wide(v).mT, weights
    if kept is not None:
        factors = _kept_factors(kept, kept_scale, weights)
        dweights, dropped = dweights * factors, weights * factors
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    dscores = dscores.masked_fill(marked, 0.0)
    dq, dk, dv = scale * dscores @ _wide(k), scale * dscores.mT @ _wide(q), dropped.mT @ wide
    wide_grads = wide_bias_grads or [False] * len(biases)
    dbiases = [
        dscores.sum_to_size(bias.shape).to(torch.promote_types(bias.dtype, torch.float32) if is_wide else bias.dtype).contiguous()
        for bias, wanted, is_wide in zip(biases, bias_grads, wide_grads)
        if wanted
    ]
    return [*(_by_tokens(gradient.to(q.dtype)) for gradient in (dq, dk, dv)), *dbiases]


def _kept_factors(kept: torch.Tensor, kept_scale: float, weights: torch.Tensor) -> torch.Tensor:
    return mask_of_bits(kept, *weights.shape[-2:]).to(weights.dtype) * kept_scale


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
    missing = loader.load().why_not(device, attention, attention_backward, attention_mask_bits)
    if missing or device.type != "cuda":
        return missing
    return device_facts(device).why_not(ops.ask("attention_min_shared_bytes", default=0))


def _check(name: str, q, k, v, biases, kept) -> None:
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
    if kept is not None:
        arguments.check_device(name, q, kept=kept)
        fits = kept.dtype == torch.int64 and arguments.same_sizes(kept.shape, _bits_sizes(scores)) and arguments.is_contiguous(kept)
        check(fits, "kept must be the bits of a mask of the scores")
    for bias in biases:
        arguments.check_device(name, q, bias=bias)
        check(bias.dtype in (q.dtype, torch.float32), f"a bias must have q's dtype or float32, not {bias.dtype}")
        fits = bias.dim() == q.dim() and all(g.same_size(a, 1) or arguments.are_same(a, b) for a, b in zip(bias.shape, scores))
        check(fits, f"a bias, {tuple(bias.shape)}, must have as many dimensions as q, each of size 1 or that of the scores")


def _empty_by_tokens(x: torch.Tensor, tokens, columns) -> torch.Tensor:
    return x.new_empty((*x.shape[:-3], tokens, x.shape[-3], columns)).transpose(-3, -2)


def _bits_sizes(scores):
    return (*scores[:-2], (scores[-1] + _WORD - 1) // _WORD, (scores[-2] + _WORD - 1) // _WORD * _WORD)


def _fake_mask_bits(mask):
    name = "attention_mask_bits"
    torch._check(mask.dim() in (4, 5), lambda: f"{name}: the mask must have four or five dimensions")
    torch._check(mask.dtype == torch.bool, lambda: f"{name}: the mask must be boolean, not {mask.dtype}")
    return mask.new_empty(_bits_sizes(mask.shape), dtype=torch.int64)


def _fake(q, k, v, biases, scale, causal, kept=None, kept_scale=1.0):
    _check("attention", q, k, v, biases, kept)
    return _empty_by_tokens(q, q.shape[-2], v.shape[-1]), q.new_empty((*q.shape[:-1], 2), dtype=torch.float32)


def _fake_backward(grad, q, k, v, biases, out, statistics, scale, causal, bias_grads, wide_bias_grads=(), kept=None, kept_scale=1.0):
    name = "attention_backward"
    _check(name, q, k, v, biases, kept)
    for tensor in (grad, out):
        arguments.check_device(name, q, tensor=tensor)
        arguments.check_dtype(name, q, tensor=tensor)
        fits = arguments.same_sizes(tensor.shape, (*q.shape[:-1], v.shape[-1]))
        torch._check(fits, lambda: f"{name}: the sizes of grad and out do not fit")
    right = (
        statistics.dtype == torch.float32 and arguments.same_sizes(statistics.shape, (*q.shape[:-1], 2)) and statistics.device == q.device
    )
    torch._check(right, lambda: f"{name}: these are not the statistics of attention")
    flags = len(bias_grads) == len(biases) and len(wide_bias_grads) in (0, len(biases))
    torch._check(flags, lambda: f"{name}: bias_grads must have a flag a bias")
    wide_grads = wide_bias_grads or [False] * len(biases)
    return [
        *(_empty_by_tokens(x, x.shape[-2], x.shape[-1]) for x in (q, k, v)),
        *(
            bias.new_empty(bias.shape, dtype=torch.float32 if is_wide else bias.dtype)
            for bias, wanted, is_wide in zip(biases, bias_grads, wide_grads)
            if wanted
        ),
    ]


attention_mask_bits = ops.define(
    "attention_mask_bits(Tensor mask) -> Tensor",
    fake=_fake_mask_bits,
    structured=False,  # any bits are a mask
)
attention = ops.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] biases, float scale, bool causal, Tensor? kept=None, float kept_scale=1.0)"
    " -> (Tensor out, Tensor statistics)",
    fake=_fake,
    layout=torch.Tag.needs_exact_strides,
)
attention_backward = ops.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor[] biases, Tensor out, Tensor statistics, float scale,"
    " bool causal, bool[] bias_grads, bool[] wide_bias_grads=[], Tensor? kept=None, float kept_scale=1.0)"
    " -> Tensor[]",
    fake=_fake_backward,
    layout=torch.Tag.needs_exact_strides,
)
ops.define("attention_min_shared_bytes() -> int", fake=lambda: ops.ask("attention_min_shared_bytes"))
ops.define("attention_limits() -> (int biases, int head_dim, int head_dim_multiple)", fake=limits)
