"""What a convolution makes a device do: our kernels with the copies that they need, and what Inductor calls and generates.

Inductor calls PyTorch's depthwise convolution, or cuDNN's, and pads, slices, adds the bias and applies SiLU in kernels of its own. These
are quantities of the same work, ``pointwise bytes`` and ``launches``: small convolutions take a few launches' time, and a launch that
follows another takes less than one alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.memory_order import is_btc
from fusebackend.patterns.causal_conv1d.nodes import size_of
from fusebackend.patterns.causal_conv1d.operator_work import Sizes, backward_work, forward_work, multiprocessors, route
from fusebackend.patterns.causal_conv1d.orders import backward_orders, forward_orders
from fusebackend.patterns.causal_conv1d.read_backward import Backward
from fusebackend.patterns.causal_conv1d.read_convolution import Convolution
from fusebackend.patterns.causal_conv1d.read_forward import Forward
from fusebackend.rewriting.pattern import Estimate, Match, Work, Workload
from fusebackend.rewriting.workload import log2

#: PyTorch hands fp16 convolutions of at least so many channels to cuDNN (``use_cudnn_depthwise`` in ATen/native/Convolution.cpp).
_CUDNN_CHANNELS = 32

_UNKNOWN = Estimate(None, "a size depends on data, so it is not known whether the convolution pays", "unmeasured")
_EMPTY = Estimate(False, "the convolution is empty")


def _sizes(conv: Convolution, left: Any, length: Any) -> Sizes:
    x = g.value(conv.x)
    known = g.hints((*x.shape, length, conv.taps, size_of(left)))
    return Sizes(known, conv.dtype, x.device, any(isinstance(size, torch.SymInt) for size in x.shape))


def forward_workloads(site: Forward, plain: Match | None = None) -> Estimate | Sequence[Workload]:
    """The work of a forward both ways, and, if there is a match without it, of leaving what follows to Inductor.

    Batch norm is not left where the same kernel convolves both ways: Inductor's would be one more.
    """
    sizes = _forward_sizes(site)
    if sizes.known is None:
        return _UNKNOWN
    if sizes.bytes == 0:
        return _EMPTY
    theirs = _inductor_forward(sizes, site)
    # A backward that stays as it is needs the value before SiLU, and so the original convolution.
    kept = (theirs,) if site.absorbs and not _is_alone(site) else ()
    whole = Workload((_our_forward(sizes, site, ()), *kept), (theirs,))
    if plain is None or not site.absorbs:
        return (whole,)
    ours = _our_forward(sizes, plain.site, _pointwise(sizes, site))
    if site.after is not None and route(ours) == route(whole.ours[0]) and forward_orders(site) == forward_orders(plain.site):
        return (whole,)
    return whole, Workload((ours,), (theirs,), match=plain)


def backward_workload(site: Backward) -> Estimate | Workload:
    """The work of a backward both ways."""
    sizes = _backward_sizes(site)
    if sizes.known is None:
        return _UNKNOWN
    if sizes.bytes == 0:
        return _EMPTY
    return Workload((_our_backward(sizes, site),), (_inductor_backward(sizes, site),))


# ---- forward ----


def _forward_sizes(site: Forward) -> Sizes:
    output = g.value(site.output)
    return _sizes(site.conv, site.left, output.shape[1 if site.transposed else 2])


def _is_alone(site: Forward) -> bool:
    """Whether only nodes that the replacement takes over use the value before SiLU."""
    inside = {*site.nodes, site.output}
    return all(user in inside for user in site.pre.users)


def _our_forward(sizes: Sizes, site: Forward, after: Sequence[int]) -> Work:
    """``after``: the bytes that each kernel moves which computes what is left to Inductor."""
    orders = forward_orders(site)
    output = g.value(site.output)
    wanted = output.transpose(1, 2) if site.transposed else output
    copies = _copied_operand(site.conv.x, orders.operands, sizes.x_bytes)
    if orders.result != is_btc(wanted) and not g.is_read_by_loops(site.output):
        copies.append(2 * sizes.bytes)
    pointwise = [*_conversion(sizes, site.conv), *after]
    x_btc = is_btc(g.value(site.conv.x)) if orders.operands is None else orders.operands
    return forward_work(sizes, x_btc, orders.result, silu=site.silu, after=site.after, copies=copies, pointwise=pointwise)


def _inductor_forward(sizes: Sizes, site: Forward) -> Work:
    node = site.anchor
    written = g.hints(g.value(node).shape)
    out_bytes = sizes.item * math.prod(written) if written else sizes.bytes
    pointwise = [*_padding(sizes, site), *_pointwise(sizes, site)]
    outputs, where = out_bytes / sizes.item, _where(sizes)
    quantities = {
        "bytes": _padded_bytes(sizes, node) + out_bytes,
        f"outputs{where}": outputs,
        f"products{where}": outputs * sizes.taps,
        "pointwise bytes": sum(pointwise),
        "launches": 1 + len(pointwise),
    }
    shape = _library(sizes) | {"x in btc": float(is_btc(g.value(site.conv.x))), "silu": float(site.activates)}
    return sizes.work("depthwise conv", quantities, shape)


def _padded_bytes(sizes: Sizes, node: fx.Node) -> int:
    """Bytes of what the convolution at ``node`` reads."""
    padded = g.hints(g.value(g.arguments(node)["input"]).shape)
    return sizes.item * math.prod(padded) if padded else sizes.x_bytes


def _padding(sizes: Sizes, site: Forward) -> list[int]:
    """The bytes that the kernel moves which pads x, unless whatever computes x writes it padded."""
    source = g.arguments(site.anchor)["input"]
    if source is site.conv.x or _is_written_by_loops(site.conv.x):
        return []
    return [sizes.x_bytes + _padded_bytes(sizes, site.anchor)]


def _pointwise(sizes: Sizes, site: Forward) -> list[int]:
    """The same of the kernel for what follows the convolution, unless the next one computes that too."""
    follows = site.absorbs or site.bias is not None or len(site.nodes) > 1
    return [2 * sizes.bytes] if follows and not g.is_read_by_loops(site.output) else []


# ---- backward ----


def _backward_sizes(site: Backward) -> Sizes:
    return _sizes(site.conv, site.left, g.value(site.grad).shape[1 if site.transposed else 2])


def _our_backward(sizes: Sizes, site: Backward) -> Work:
    orders = backward_orders(site)
    grad = g.value(site.grad)
    grad = grad.transpose(1, 2) if site.transposed else grad
    dx, needed = site.results[0], [r is not None for r in site.results]
    copies = _copied_operand(site.conv.x, orders.operands, sizes.x_bytes)
    copies += _copied_operand(site.grad, None if orders.operands is None else orders.operands != site.transposed, sizes.bytes)
    if dx is not None and orders.result != is_btc(g.value(dx)) and not g.is_read_by_loops(dx):
        copies.append(2 * sizes.x_bytes)
    pointwise = _conversion(sizes, site.conv)
    x_btc, grad_btc = (is_btc(g.value(site.conv.x)), is_btc(grad)) if orders.operands is None else (orders.operands,) * 2
    used = (x_btc, grad_btc, orders.result)
    return backward_work(sizes, used, needed, silu=site.silu, copies=copies, pointwise=pointwise)


def _inductor_backward(sizes: Sizes, site: Backward) -> Work:
    node = site.nodes[0]
    args = g.arguments(node)
    padded_bytes = _padded_bytes(sizes, node)
    grads = g.hints(g.value(args["grad_output"]).shape)
    grad_bytes = sizes.item * math.prod(grads) if grads else sizes.bytes
    of_x, of_weight, of_bias = (r is not None for r in site.results)
    pointwise = []
    if args["input"] is not site.conv.x:  # padded again, rather than kept from the forward
        pointwise.append(sizes.x_bytes + padded_bytes)
    if site.silu or args["grad_output"] is not site.grad:
        pointwise.append(sizes.bytes * (2 if site.silu else 1) + grad_bytes)
    if of_bias:
        pointwise.append(grad_bytes)
    if of_x and args["input"] is not site.conv.x and not g.is_read_by_loops(site.results[0]):
        pointwise.append(2 * sizes.x_bytes)  # the crop
    outputs, where = grad_bytes / sizes.item, _where(sizes)
    quantities = {
        "bytes": grad_bytes * (of_x + of_weight) + padded_bytes * (of_x + of_weight),
        f"outputs{where}": outputs * of_x,
        f"products{where}": outputs * sizes.taps * (of_x + of_weight),
        # ATen sums each weight's gradient in a thread block of its own.
        f"sums in waves{where}": _waves(sizes, sizes.channels * sizes.taps) * outputs / sizes.channels * of_weight,
        f"samples{where}": outputs / sizes.channels * of_weight,
    }
    shape = _library(sizes) | {"of x": float(of_x), "of weight": float(of_weight), "log2 weights": log2(sizes.channels * sizes.taps)}
    quantities |= {"pointwise bytes": sum(pointwise), "launches": of_x + of_weight + len(pointwise)}
    shape |= {"x in btc": float(is_btc(g.value(site.conv.x))), "silu": float(site.silu)}
    return sizes.work("depthwise conv backward", quantities, shape)


# ---- both ----


def _waves(sizes: Sizes, blocks: int) -> int:
    return math.ceil(blocks / multiprocessors(sizes))


def _where(sizes: Sizes) -> str:
    """Behind a quantity's name: which library has the kernel."""
    return " of cuDNN" if _library(sizes)["cudnn"] and sizes.device.type == "cuda" else ""


def _library(sizes: Sizes) -> dict[str, float]:
    """What decides which of the library's kernels runs."""
    half = sizes.dtype == torch.float16
    return {"half": float(half), "cudnn": float(half and sizes.channels >= _CUDNN_CHANNELS), "one channel": float(sizes.channels == 1)}


def _conversion(sizes: Sizes, conv: Convolution) -> list[int]:
    """The bytes that the kernel moves which converts x to the dtype that is convolved, unless whatever computes x writes it so."""
    x = g.value(conv.x)
    if x.dtype == conv.dtype or _is_written_by_loops(conv.x):
        return []
    return [sizes.x_bytes // sizes.item * (x.dtype.itemsize + sizes.item)]


def _copied_operand(node: fx.Node, btc: bool | None, size: int) -> list[int]:
    """The bytes that the kernel moves which brings an operand into a memory order, unless what computes it writes it so."""
    strides, sizes = g.hints(g.value(node).stride()), g.hints(g.value(node).shape)
    if btc is None or strides is None or sizes is None:
        return []
    dim = 1 if btc else 2
    return [] if strides[dim] == 1 or sizes[dim] <= 1 or _is_written_by_loops(node) else [2 * size]


def _is_written_by_loops(node: fx.Node) -> bool:
    """Whether a kernel that Inductor generates computes the value, and can write it in any order, padded or converted."""
    return g.is_fusable(g.through_views(node))
