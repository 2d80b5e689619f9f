"""The family's operators: schemas, fakes, a reference in PyTorch, and queries of what the kernels support."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops
from fusebackend.patterns.causal_conv1d.channel_reference import check_epilogue, finished


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    left: int,
    right: int,
    shift: float = 0.0,
    silu: bool = False,
    mean: torch.Tensor | None = None,
    variance: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> torch.Tensor:
    """What ``fusebackend::causal_conv1d`` computes.

    Args:
        x: (batch, channels, time); zeros are added before (``left``) and after (``right``) along time.
        weight: (channels, 1, taps).
        bias: (channels,) or None.
        shift: a constant added to every output, before SiLU.
        silu: whether SiLU is applied, and nothing of what follows.
        mean, variance, scale, offset: (channels,) or None, of x's dtype or of that of the sums: batch norm in inference.
        eps: what is added to the variance.
        activation: a name of ``channel_reference.ACTIVATIONS``, or "".

    Returns:
        (batch, channels, time + left + right - taps + 1), in x's dtype; sums are in fp32 for 16-bit floats.
    """
    out = F.conv1d(F.pad(x, (left, right)), weight, bias, groups=x.shape[1]) + shift
    return F.silu(out) if silu else finished(out, mean, variance, scale, offset, eps, activation).to(x.dtype)


def _empty(x: torch.Tensor, length: Any, channels_last: bool) -> torch.Tensor:
    if channels_last:
        return x.new_empty((x.shape[0], length, x.shape[1])).transpose(1, 2)
    return x.new_empty((x.shape[0], x.shape[1], length))


#: Those that the kernels take.
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def _limits() -> tuple[int, int, int, int]:
    """``causal_conv1d_limits()``: the most samples of a row, taps, and tiles of ``tile_samples`` in all rows. Without a library, whose
    operators nothing calls then, any numbers will do."""
    return ops.ask("causal_conv1d_limits", default=(1 << 62, 1 << 62, 1 << 62, 256))


def _check(operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, left: Any, length: Any) -> None:
    """Refuses what csrc/causal_conv1d/bind.h refuses; ``length`` is the result's."""

    def check(holds: bool, message: str) -> None:
        torch._check(holds, lambda: f"{operator}: {message}")

    check(x.dim() == 3 and weight.dim() == 3, "x must be (batch, channels, time) and weight (channels, 1, taps)")
    check(x.dtype in DTYPES, f"{x.dtype} is not supported")
    shape_fits = arguments.are_same(weight.shape[0], x.shape[1]) and arguments.are_same(weight.shape[1], 1) and g.hint(weight.shape[2]) != 0
    check(shape_fits, f"weight must be ({x.shape[1]}, 1, taps), got {tuple(weight.shape)}")
    if bias is not None:
        check(arguments.same_sizes(bias.shape, x.shape[1:2]), f"bias must be ({x.shape[1]},), got {tuple(bias.shape)}")
    arguments.check_dtype(operator, x, weight=weight, bias=bias)
    arguments.check_device(operator, x, weight=weight, bias=bias)
    counts = [g.hint(n) for n in (x.shape[2], weight.shape[2], length, left)]
    check(counts[2] is None or counts[2] >= 0, "more taps than padded samples")
    most, most_taps, most_tiles, tile = _limits()
    fits = all(n is None or -most <= n <= most for n in counts)
    check(fits, f"rows of more than {most} samples are not supported")
    check((counts[1] or 0) <= most_taps, f"more than {most_taps} taps are not supported")
    rows = [g.hint(n) or 0 for n in x.shape[:2]]
    tiles = rows[0] * rows[1] * -(-max(counts[0] or 0, counts[2] or 0) // tile)
    check(tiles <= most_tiles, f"more than {most_tiles} rows, or tiles of {tile} samples of rows, are not supported")


def _fake(
    x, weight, bias, left, right, shift, silu, channels_last, mean=None, variance=None, scale=None, offset=None, eps=0.0, activation=""
):
    length = x.shape[2] + left + right - weight.shape[2] + 1 if x.dim() == weight.dim() == 3 else None
    _check("causal_conv1d", x, weight, bias, left, length)
    vectors = {"mean": mean, "variance": variance, "scale": scale, "offset": offset}
    check_epilogue("causal_conv1d", x, x.shape[1], activation, **vectors)
    another = activation or any(v is not None for v in vectors.values())
    torch._check(not (silu and another), lambda: "causal_conv1d: SiLU and another epilogue")
    return _empty(x, length, channels_last)


def _fake_backward(grad, x, weight, bias, left, shift, silu, channels_last, need_x, need_weight, need_bias):
    _check("causal_conv1d_backward", x, weight, bias, left, grad.shape[2] if grad.dim() == 3 else None)
    fits = grad.dim() == 3 and arguments.same_sizes(grad.shape[:2], x.shape[:2])
    torch._check(fits, lambda: f"causal_conv1d_backward: grad must have x's batch and channels, got {tuple(grad.shape)}")
    arguments.check_dtype("causal_conv1d_backward", x, grad=grad)
    arguments.check_device("causal_conv1d_backward", x, grad=grad)
    return (
        _empty(x, x.shape[2], channels_last) if need_x else x.new_empty((0,)),
        x.new_empty(weight.shape if need_weight else (0,)),
        x.new_empty((x.shape[1] if need_bias else 0,)),
    )


causal_conv1d = ops.define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, SymInt left, SymInt right, float shift, bool silu, bool channels_last,"
    ' Tensor? mean=None, Tensor? variance=None, Tensor? scale=None, Tensor? offset=None, float eps=0., str activation="") -> Tensor',
    fake=_fake,
    layout=ops.UNPADDED,
)
causal_conv1d_backward = ops.define(
    "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, SymInt left, float shift, bool silu,"
    " bool channels_last, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    layout=ops.UNPADDED,
)


def prefers_btc(element_size: int, taps: int) -> bool:
    """Whether the CUDA kernels are faster on (batch, time, channels) tensors than on copies of them in (batch, channels, time)."""
    return ops.ask("causal_conv1d_prefers_btc", element_size, taps)


def transposes_btc(element_size: int, channels: int, length: int, taps: int, backward: bool) -> bool:
    """Whether a CUDA kernel for a causal convolution takes x as (batch, time, channels), and everything else as (batch, channels, time),
    without a copy and at full speed."""
    return ops.ask("causal_conv1d_transposes_btc", element_size, channels, length, taps, backward)


# Implemented by csrc/causal_conv1d/bind.h and memory_order.h. They do not appear in graphs.
ops.define("causal_conv1d_limits() -> (int samples, int taps, int tiles, int tile_samples)", fake=_limits)
ops.define("causal_conv1d_prefers_btc(int element_size, int taps) -> bool", fake=prefers_btc)
ops.define("causal_conv1d_transposes_btc(int element_size, int channels, int length, int taps, bool backward) -> bool", fake=transposes_btc)
