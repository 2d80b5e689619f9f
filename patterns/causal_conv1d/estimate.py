"""What a convolution makes a device do: our kernels with the copies that they need, and what Inductor calls and generates.

Inductor calls PyTorch's depthwise convolution, or cuDNN's, and pads, slices, adds the bias and applies SiLU in kernels of its own. These
are quantities of the same work, ``pointwise bytes`` and ``launches``: small convolutions take a few launches' time, and a launch that
follows another takes less than one alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusebackend import fx_utils as g
from fusebackend.patterns.causal_conv1d.memory_order import is_btc
from fusebackend.patterns.causal_conv1d.nodes import size_of
from fusebackend.patterns.causal_conv1d.orders import backward_orders, forward_orders
from fusebackend.patterns.causal_conv1d.read_backward import Backward
from fusebackend.patterns.causal_conv1d.read_convolution import Convolution
from fusebackend.patterns.causal_conv1d.read_forward import Forward
from fusebackend.patterns.causal_conv1d.work import kernel_work
from fusebackend.rewriting.device_facts import device_facts
from fusebackend.rewriting.pattern import Estimate, Match, Work, Workload
from fusebackend.rewriting.workload import alignment, log2

#: PyTorch hands fp16 convolutions of at least so many channels to cuDNN (``use_cudnn_depthwise`` in ATen/native/Convolution.cpp).
_CUDNN_CHANNELS = 32

_UNKNOWN = Estimate(None, "a size depends on data, so it is not known whether the convolution pays", "unmeasured")
_EMPTY = Estimate(False, "the convolution is empty")


class _Sizes:
    """The sizes of a convolution as they were when the graph was traced, and where it runs."""

    def __init__(self, conv: Convolution, left: Any, length: Any):
        x = g.value(conv.x)
        self.dtype, self.device, self.item = conv.dtype, x.device, conv.dtype.itemsize
        self.known = g.hints((*x.shape, length, conv.taps, size_of(left)))
        self.dynamic = any(isinstance(s, torch.SymInt) for s in x.shape)
        if self.known is not None:
            self.batch, self.channels, self.samples, self.length, self.taps, self.left = self.known
            self.x_bytes = self.item * self.batch * self.channels * self.samples
            self.bytes = self.item * self.batch * self.channels * self.length
            self.products = self.batch * self.channels * self.length * min(self.taps, self.samples)

    def kind(self, name: str) -> str:
        return name if self.device.type == "cuda" else f"{name} {self.device.type}"

    def work(self, name: str, quantities: Mapping[str, float], shape: Mapping[str, float]) -> Work:
        return Work(self.kind(name), {n: float(q) for n, q in quantities.items()}, {**self._common_shape(), **shape})

    def _common_shape(self) -> dict[str, float]:
        return {
            "log2 batch": log2(self.batch),
            "log2 channels": log2(self.channels),
            "log2 samples": log2(self.samples),
            "log2 taps": log2(self.taps),
            "log2 taps per sample": log2(self.taps / max(self.samples, 1)),
            "element": float(self.item),
            "row alignment": alignment(self.item * self.samples),
            "channel alignment": alignment(self.item * self.channels),
            "dynamic": float(self.dynamic),
        }


def forward_workloads(site: Forward, without_silu: Match | None = None) -> Estimate | Sequence[Workload]:
    """The work of a forward both ways, and, if there is such a match, of leaving its SiLU to Inductor."""
    sizes = _forward_sizes(site)
    if sizes.known is None:
        return _UNKNOWN
    if sizes.bytes == 0:
        return _EMPTY
    theirs = _inductor_forward(sizes, site)
    # A backward that stays as it is needs the value before SiLU, and so the original convolution.
    kept = (theirs,) if site.silu and not _is_alone(site) else ()
    whole = Workload((_our_forward(sizes, site, ()), *kept), (theirs,))
    if without_silu is None or not site.silu:
        return (whole,)
    ours = _our_forward(sizes, without_silu.site, _pointwise(sizes, site))
    return whole, Workload((ours,), (theirs,), match=without_silu)


def backward_workload(site: Backward) -> Estimate | Workload:
    """The work of a backward both ways."""
    sizes = _backward_sizes(site)
    if sizes.known is None:
        return _UNKNOWN
    if sizes.bytes == 0:
        return _EMPTY
    return Workload((_our_backward(sizes, site),), (_inductor_backward(sizes, site),))


# ---- forward ----


def _forward_sizes(site: Forward) -> _Sizes:
    output = g.value(site.output)
    return _Sizes(site.conv, site.left, output.shape[1 if site.transposed else 2])


def _is_alone(site: Forward) -> bool:
    """Whether only nodes that the replacement takes over use the value before SiLU."""
    inside = {*site.nodes, site.output}
    return all(user in inside for user in site.pre.users)


def _our_forward(sizes: _Sizes, site: Forward, after: Sequence[int]) -> Work:
    """``after``: the bytes that each kernel moves which computes what is left to Inductor."""
    orders = forward_orders(site)
    output = g.value(site.output)
    wanted = output.transpose(1, 2) if site.transposed else output
    copies = _copied_operand(site.conv.x, orders.operands, sizes.x_bytes)
    if orders.result != is_btc(wanted) and not _is_read_by_loops(site.output):
        copies.append(2 * sizes.bytes)
    pointwise = [*_conversion(sizes, site.conv), *after]
    x_btc = is_btc(g.value(site.conv.x)) if orders.operands is None else orders.operands
    quantities = {"bytes": sizes.x_bytes + sizes.bytes, "copied bytes": sum(copies), "pointwise bytes": sum(pointwise)}
    quantities["launches"] = 1 + len(copies) + len(pointwise)
    shape = {"x in btc": float(x_btc), "result in btc": float(orders.result), "silu": float(site.silu)}
    if sizes.device.type == "cuda":
        facts = _kernel_work(sizes, (x_btc, orders.result, False), site.silu)
        quantities |= _products(sizes, facts, sizes.products, x_btc) | {"blocks": facts["blocks"]}
        shape |= _route(facts) | _fill(sizes, facts)
    else:
        quantities["products"] = sizes.products
    quantities["activations"] = sizes.bytes / sizes.item if site.silu else 0
    return sizes.work("causal_conv1d", quantities, shape)


def _inductor_forward(sizes: _Sizes, site: Forward) -> Work:
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
    shape = _library(sizes) | {"x in btc": float(is_btc(g.value(site.conv.x))), "silu": float(site.silu)}
    return sizes.work("depthwise conv", quantities, shape)


def _padded_bytes(sizes: _Sizes, node: fx.Node) -> int:
    """Bytes of what the convolution at ``node`` reads."""
    padded = g.hints(g.value(g.arguments(node)["input"]).shape)
    return sizes.item * math.prod(padded) if padded else sizes.x_bytes


def _padding(sizes: _Sizes, site: Forward) -> list[int]:
    """The bytes that the kernel moves which pads x, unless whatever computes x writes it padded."""
    source = g.arguments(site.anchor)["input"]
    if source is site.conv.x or _is_written_by_loops(site.conv.x):
        return []
    return [sizes.x_bytes + _padded_bytes(sizes, site.anchor)]


def _pointwise(sizes: _Sizes, site: Forward) -> list[int]:
    """The same of the kernel for what follows the convolution, unless the next one computes that too."""
    follows = site.silu or site.bias is not None or len(site.nodes) > 1
    return [2 * sizes.bytes] if follows and not _is_read_by_loops(site.output) else []


# ---- backward ----


def _backward_sizes(site: Backward) -> _Sizes:
    return _Sizes(site.conv, site.left, g.value(site.grad).shape[1 if site.transposed else 2])


def _our_backward(sizes: _Sizes, site: Backward) -> Work:
    orders = backward_orders(site)
    grad = g.value(site.grad)
    grad = grad.transpose(1, 2) if site.transposed else grad
    dx, needed = site.results[0], [r is not None for r in site.results]
    copies = _copied_operand(site.conv.x, orders.operands, sizes.x_bytes)
    copies += _copied_operand(site.grad, None if orders.operands is None else orders.operands != site.transposed, sizes.bytes)
    if dx is not None and orders.result != is_btc(g.value(dx)) and not _is_read_by_loops(dx):
        copies.append(2 * sizes.x_bytes)
    pointwise = _conversion(sizes, site.conv)
    x_btc, grad_btc = (is_btc(g.value(site.conv.x)), is_btc(grad)) if orders.operands is None else (orders.operands,) * 2
    quantities: dict[str, float] = {"bytes": sizes.x_bytes * (1 + needed[0]) + sizes.bytes, "copied bytes": sum(copies)}
    quantities |= {"pointwise bytes": sum(pointwise), "launches": len(copies) + len(pointwise)}
    shape = {"x in btc": float(x_btc), "gradient in btc": float(grad_btc), "result in btc": float(orders.result), "silu": float(site.silu)}
    shape |= {"of x": float(needed[0]), "of weight": float(needed[1] or needed[2])}
    sums = site.silu + needed[0] + (needed[1] or needed[2])  # of products
    if sizes.device.type == "cuda":
        facts = _kernel_work(sizes, (x_btc, grad_btc, orders.result), site.silu, needed)
        of_weight = (needed[1] or needed[2]) and not facts["one_pass"]
        quantities |= _products(sizes, facts, sizes.products * (sums - of_weight), x_btc)
        if of_weight:
            route = "grad_window" if facts["grad_window"] else "grad_tensor_cores" if facts["grad_tensor_cores"] else "grad_tile"
            quantities[route] = sizes.products
        quantities |= {"blocks": facts["blocks"], "bytes between kernels": facts["wide_bytes"]}
        quantities["launches"] += facts["launches"]
        shape |= _route(facts) | _fill(sizes, facts) | {"one pass": facts["one_pass"], "grad window": facts["grad_window"]}
    else:
        quantities["products"] = sizes.products * sums
    quantities["activations"] = sizes.bytes / sizes.item if site.silu else 0
    return sizes.work("causal_conv1d backward", quantities, shape)


def _inductor_backward(sizes: _Sizes, site: Backward) -> Work:
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
    if of_x and args["input"] is not site.conv.x and not _is_read_by_loops(site.results[0]):
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


def _kernel_work(sizes: _Sizes, orders: Sequence[bool], silu: bool, needed: Sequence[bool] = ()) -> Mapping[str, float]:
    return kernel_work(sizes.known[:5], orders, sizes.dtype, sizes.left, silu, _multiprocessors(sizes), needed)


def _products(sizes: _Sizes, facts: Mapping[str, float], products: float, btc: bool) -> dict[str, float]:
    """Products by what computes them, as if all multiprocessors and lanes had some, and the points of Fourier transforms."""
    names = ("doubles", "tensor_cores", "fft", "short", "window")
    route = next((name for name in names if facts[name]), "tile")
    if route == "fft":
        points = 2 ** math.ceil(math.log2(max(sizes.samples + sizes.taps, 2)))
        return {"fft points": sizes.channels * (math.ceil(sizes.batch / 2) + 0.5) * points}
    if route == "tensor_cores":  # whole groups of eight batch entries
        products *= math.ceil(sizes.batch / 8) * 8 / sizes.batch
    idle = max(_multiprocessors(sizes) / facts["blocks"], 1.0)
    order = " btc" if btc and route in ("short", "window") else ""  # other kernels for other orders
    return {f"products ({route}{order})": products * idle * facts["lanes"]}


def _route(facts: Mapping[str, float]) -> dict[str, float]:
    return {name: facts[name] for name in ("short", "window", "tensor_cores", "fft", "doubles")}


def _multiprocessors(sizes: _Sizes) -> int:
    return device_facts(sizes.device).multiprocessors if sizes.device.type == "cuda" else torch.get_num_threads()


def _fill(sizes: _Sizes, facts: Mapping[str, float]) -> dict[str, float]:
    return {"log2 blocks per multiprocessor": log2(facts["blocks"] / _multiprocessors(sizes)), "log2 lanes": log2(facts["lanes"])}


def _waves(sizes: _Sizes, blocks: int) -> int:
    return math.ceil(blocks / _multiprocessors(sizes))


def _where(sizes: _Sizes) -> str:
    """Behind a quantity's name: which library has the kernel."""
    return " of cuDNN" if _library(sizes)["cudnn"] and sizes.device.type == "cuda" else ""


def _library(sizes: _Sizes) -> dict[str, float]:
    """What decides which of the library's kernels runs."""
    half = sizes.dtype == torch.float16
    return {"half": float(half), "cudnn": float(half and sizes.channels >= _CUDNN_CHANNELS), "one channel": float(sizes.channels == 1)}


def _conversion(sizes: _Sizes, conv: Convolution) -> list[int]:
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


def _is_read_by_loops(node: fx.Node) -> bool:
    """Whether kernels that Inductor generates, and nothing else, read the value: they can read it in any order, and compute more."""
    users = list(g.consumers(node))
    return bool(users) and all(g.is_fusable(user) for user in users)
